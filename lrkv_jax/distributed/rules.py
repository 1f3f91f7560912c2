"""One table from the meaning of an axis to the mesh axis that shards it, and batches placed by it.

An axis that its mesh axis does not divide stays whole: that is how the single shared key of MQA
and LRKV is replicated under tensor parallelism. Shapes for which that would be a mistake are
refused by `lrkv_jax.distributed.mesh.check_mesh`.

B rows of the whole batch  b rows of this process  U tokens of a row
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from lrkv_jax.errors import LrkvError, nearest

BATCH = ("data", "fsdp")
CONTEXT = "context"
TENSOR = "tensor"

# The mesh axes of each logical axis.
Rules = Mapping[str, str | tuple[str, ...] | None]
RULES: Rules = {
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


def check_rules(pairs: Rules | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The rules, a mapping or pairs, as pairs.

    Raises `LrkvError` for what is neither, and for a logical axis that does not exist.
    """
    try:
        rules = dict(pairs)
    except (TypeError, ValueError):
        raise LrkvError(f"axis_rules = {pairs!r}: give pairs, as in [('heads', 'model')]") from None
    for name in rules:
        if name not in RULES:
            raise LrkvError(f"axis_rules: there is no logical axis {name}{nearest(name, RULES)}")
    return tuple((n, tuple(axis) if isinstance(axis, list) else axis) for n, axis in rules.items())


def mesh_axes_of(name: str, rules: Rules = RULES) -> tuple[str, ...]:
    """The mesh axes that shard a logical axis: none, one or several."""
    rule = rules[name]
    return () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)


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
    """The sharding of an array that every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Rows of a batch over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def constrain_batch(x: jax.Array) -> jax.Array:
    """Keep a [B, ...] activation split over the batch axes, where the compiler places it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or not set(BATCH) <= set(mesh.axis_names):
        return x
    if x.shape[0] % math.prod(mesh.shape[axis] for axis in BATCH):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH))


def local_rows(rows: NamedSharding, batch: int) -> range:
    """The rows of a batch of `batch` that this process's devices hold under the sharding `rows`.

    Processes that share a sequence (a `tensor` or `context` axis across hosts) have the same rows.

    Raises `LrkvError` where they are not one run of rows, so that a host would read scattered ones.
    """
    ours: set[int] = set()
    for index in rows.addressable_devices_indices_map((batch,)).values():
        ours.update(range(*index[0].indices(batch)))
    first, last = min(ours), max(ours)
    if len(ours) != last - first + 1:
        raise LrkvError(
            f"the mesh gives process {jax.process_index()} {len(ours)} scattered rows of the batch "
            f"from {first} to {last}: order the devices by process"
        )
    return range(first, last + 1)


def as_argument(
    rows: NamedSharding, batch: int, tokens_bU: np.ndarray
) -> Int[Array, "B U"] | Int[np.ndarray, "B U"]:
    """The whole batch as a compiled program takes it, from this process's `local_rows` of it."""
    if rows.is_fully_addressable:
        # One process has all of it, and the program's call places it in a tenth of the time that
        # `jax.device_put` takes before the call.
        return tokens_bU
    shape = batch, tokens_bU.shape[1]
    return jax.make_array_from_process_local_data(rows, tokens_bU, shape)


def global_batch(rows: NamedSharding, tokens_BU: np.ndarray) -> Int[Array, "B U"]:
    """A global array of a batch that every process has read whole; each places its part."""
    return jax.make_array_from_callback(tokens_BU.shape, rows, lambda index: tokens_BU[index])
