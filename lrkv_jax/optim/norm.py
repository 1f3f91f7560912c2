"""The global norm of a tree that lies in pieces on a mesh."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lrkv_jax.distributed.mesh import in_use
from lrkv_jax.distributed.rules import partition


def global_norm(tree: Any, specs: Any) -> Float[Array, ""]:
    """The Euclidean norm of all leaves together, float32; `specs` mirrors `tree`.

    On a training mesh each device sums what it holds, and one all-reduce of one number follows:
    optax's would make one for each way in which leaves are split.
    """
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    mesh = in_use()
    if mesh is None:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves))
    pairs = zip(jax.tree.leaves(specs), leaves, strict=True)
    places = [partition(spec.axes, leaf.shape, mesh) for spec, leaf in pairs]

    def local(leaves):
        squares = [
            jnp.sum(jnp.square(x)) * (_pieces(place, mesh) / mesh.size)
            for x, place in zip(leaves, places, strict=True)
        ]
        return jnp.sqrt(lax.psum(sum(squares), mesh.axis_names))

    out = PartitionSpec()
    return jax.shard_map(local, in_specs=(places,), out_specs=out, check_vma=False)(leaves)


def _pieces(place, mesh):
    """In how many pieces a leaf is split; its other copies count as one."""
    names = [n for entry in place for n in (entry if isinstance(entry, tuple) else (entry,)) if n]
    return math.prod(mesh.shape[name] for name in names)
