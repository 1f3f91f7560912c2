"""Cached attention on a mesh: each device attends with its own heads to its own sequences.

A Mosaic kernel cannot be partitioned by the compiler, and a cache must never be gathered: so the
part of a layer between its input and its heads' outputs runs in `jax.shard_map`. Heads are split
over `tensor`, sequences over `data` and `fsdp`. What all heads share (LRKV's shared keys and
values, MLA's latent and rope key, the single head of MQA) is whole on every tensor shard.

B batch  T new tokens  D model width  H heads  K head width
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lrkv_jax.distributed.rules import BATCH, RULES
from lrkv_jax.models.weights import spec_of, variables

HEADS = ("heads", "kv_heads")


def on_mesh(attend, layer, x_BTD, positions_BT, cache, pages_BN=None):
    """`attend(layer, x, positions, cache, pages)` on the mesh in use: heads' outputs, the cache.

    Without a mesh, or on one of a single device, this is the call itself. Where sequences are split
    a pool of pages is too: a sequence's table then counts from its own shard's first page.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(layer, x_BTD, positions_BT, cache, pages_BN)
    weights, tree = jax.tree.flatten(layer)

    def local(weights, x_BTD, positions_BT, cache, pages_BN):
        return attend(tree.unflatten(weights), x_BTD, positions_BT, cache, pages_BN)

    split = splits_heads(layer, mesh)
    specs = [_partition(*axes_shape, mesh, split) for axes_shape in _weights(layer)]
    rows = _partition(("batch",), x_BTD.shape[:1], mesh, split)
    out = _partition(
        ("batch", "positions", "heads"), (*x_BTD.shape[:2], layer.config.heads), mesh, split
    )
    cache_specs = _cache_partitions(cache, mesh, split)
    # Off: a Pallas kernel's results do not say over which axes they vary.
    mapped = jax.shard_map(
        local, in_specs=(specs, rows, rows, cache_specs, rows), out_specs=(out, cache_specs),
        check_vma=False,
    )  # fmt: skip
    return mapped(weights, x_BTD, positions_BT, cache, pages_BN)


def splits_heads(layer: Any, mesh: Any) -> bool:
    """Whether `tensor` divides the layer's heads, and its key/value heads if there are several.

    Where it does not, every tensor shard attends with all heads.
    """
    tensor = mesh.shape[RULES["heads"]]
    sizes = {
        size
        for axes, shape in _weights(layer)
        for name, size in zip(axes, shape, strict=True)
        if name in HEADS
    }
    return layer.config.heads % tensor == 0 and all(n == 1 or n % tensor == 0 for n in sizes)


def cache_shardings(layer: nnx.Module, shapes: Any, mesh: Mesh) -> Any:
    """`NamedSharding` of every array of a layer's cache."""
    parts = _cache_partitions(shapes, mesh, splits_heads(layer, mesh))
    return jax.tree.map(lambda part: NamedSharding(mesh, part), parts)


def constrain_cache(layer: nnx.Module, cache: Any) -> Any:
    """In a program: the cache where `cache_shardings` has it, on the mesh in use."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return cache
    parts = _cache_partitions(cache, mesh, splits_heads(layer, mesh))
    return jax.tree.map(jax.lax.with_sharding_constraint, cache, parts)


def _cache_partitions(cache, mesh, split):
    """The same dataclass, with the placement of each array that is there."""

    def of(name, array):
        axes = cache.AXES[name].split()  # scales of rows have all but the last
        return jax.tree.map(
            lambda part: _partition(axes[: part.ndim], part.shape, mesh, split), array
        )

    return type(cache)(**{name: of(name, array) for name, array in vars(cache).items()})


def _weights(layer) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(axes, shape) of each weight, in the order of the layer's leaves."""
    return [(spec_of(v).axes, v.get_value().shape) for v in variables(layer)]


def _partition(axes: Sequence[str], shape: Sequence[int], mesh, split: bool) -> PartitionSpec:
    """Sequences over the batch axes, heads over theirs; a single one, and all else, stays whole."""
    rows = math.prod(mesh.shape[axis] for axis in BATCH)

    def place(name, size):
        if name == "batch":
            return BATCH if size % rows == 0 else None
        return RULES[name] if name in HEADS and split and size > 1 else None

    places = list(map(place, axes, shape))
    # As the compiler writes the placement of its results: an equal one is no new program.
    while places and places[-1] is None:
        places.pop()
    return PartitionSpec(*places)
