"""One table from the meaning of an axis to the mesh axis that shards it.

An axis that its mesh axis does not divide stays whole: that is how the single shared key of MQA
and LRKV is replicated under tensor parallelism. Shapes for which that would be a mistake are
refused by `lrkv_jax.distributed.mesh.check_mesh`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

BATCH = ("data", "fsdp")
CONTEXT = "context"
TENSOR = "tensor"

RULES: dict[str, str | tuple[str, ...] | None] = {
    # Activations.
    "batch": BATCH,
    "positions": CONTEXT,
    # Parameters.
    "layers": None,
    "embed": "fsdp",
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head_width": None,
    "rank": None,
    "latent": None,
    "rope": None,
    "mlp": TENSOR,
    "vocabulary": TENSOR,
}


def mesh_axes_of(name: str) -> tuple[str, ...]:
    """The mesh axes that shard a logical axis: none, one or several."""
    rule = RULES[name]
    return () if rule is None else (rule,) if isinstance(rule, str) else rule


def partition(axes: Sequence[str], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """The placement of an array whose axes have these logical names."""

    def place(name, size):
        devices = math.prod(mesh.shape[axis] for axis in mesh_axes_of(name))
        return RULES[name] if size % devices == 0 else None

    return PartitionSpec(*map(place, axes, shape))


def parameter_shardings(specs: Any, shapes: Any, mesh: Mesh | AbstractMesh) -> Any:
    """`NamedSharding` of every parameter, from its `WeightSpec` and its shape."""
    return jax.tree.map(
        lambda spec, leaf: NamedSharding(mesh, partition(spec.axes, leaf.shape, mesh)),
        specs,
        shapes,
    )


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Rows of a batch over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def constrain_batch(x: jax.Array) -> jax.Array:
    """Keep a [B, ...] activation split over the batch axes, where the compiler places it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or x.shape[0] % math.prod(mesh.shape[a] for a in BATCH):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH))
