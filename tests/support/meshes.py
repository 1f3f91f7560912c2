"""Meshes of the first devices."""

import jax

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh


def mesh_of(data=1, fsdp=1, context=1, tensor=1):
    """A mesh of as many devices as its sizes take: by default one."""
    sizes = MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor)
    return make_mesh(sizes, jax.devices()[: data * fsdp * context * tensor])
