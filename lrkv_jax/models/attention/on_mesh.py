"""Attention on a mesh: each device attends with its heads to its sequences.

A Mosaic kernel cannot be partitioned by the compiler, and a cache must never be gathered: so the
part of a layer between its input and its heads' outputs runs in `jax.shard_map`. By our rules heads
are split over `tensor`, sequences over `data` and `fsdp`; a layer's `axis_rules` change that. An
axis that the mesh does not have splits nothing. What all heads share (LRKV's shared keys and
values, MLA's latent and rope key, the single head of MQA) is whole on every shard.

B batch  T new tokens  D model width  H heads  K head width
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lrkv_jax.distributed.rules import RULES, mesh_axes_of
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.weights import spec_of, variables

HEADS = ("heads", "kv_heads")


def on_mesh(attend, layer, x_BTD, cache, *rows):
    """`attend(layer, x, cache, *rows)` on the mesh in use: heads' outputs, and the cache or None.

    `rows` are arrays [B, ...], or None. Without a mesh, on one of a single device, and where every
    axis is manual already, this is the call itself. Where sequences are split a pool of pages is
    too: a sequence's table then counts from its shard's first page. Raises `LrkvError` where the
    mesh divides only one of the two.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape[axis] for axis in _free_axes(mesh)) == 1:
        return attend(layer, x_BTD, cache, *rows)
    weights, tree = jax.tree.flatten(layer)

    def local(weights, x_BTD, cache, *rows):
        return attend(tree.unflatten(weights), x_BTD, cache, *rows)

    parts = _Partitions(layer, mesh)
    parts.check_pool(len(x_BTD), cache)
    batch = parts.of(("batch",), x_BTD.shape[:1])
    out = parts.of(("batch", "positions", "heads"), (*x_BTD.shape[:2], layer.config.heads))
    cache_specs = None if cache is None else parts.of_cache(cache)
    weight_specs = [parts.of(*axes_shape) for axes_shape in _weights(layer)]
    arguments = weights, x_BTD, cache, *rows
    specs = weight_specs, batch, cache_specs, *[batch for _ in rows]
    if mesh.explicit_axes:
        arguments = jax.tree.map(_resharded, specs, arguments)
    # Off: a Pallas kernel's results do not declare over which axes they vary.
    mapped = jax.shard_map(
        local, in_specs=specs, out_specs=(out, cache_specs), axis_names=set(_free_axes(mesh)),
        check_vma=False,
    )  # fmt: skip
    return mapped(*arguments)


def heads_axes(layer: nnx.Module) -> tuple[str, ...]:
    """The axes of the mesh in use over which heads are split, for sums over all of them."""
    mesh, axes = jax.sharding.get_abstract_mesh(), mesh_axes_of("heads", _rules(layer))
    return tuple(axis for axis in axes if axis in mesh.axis_names)


def summed_over_heads(out_BTHK: jax.Array) -> PartitionSpec | None:
    """The sharding of [B, T, D] summed over heads, on a mesh of explicit axes; None elsewhere.

    Explicit axes need the placement of a sum; elsewhere the compiler finds it.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return None
    return PartitionSpec(*jax.typeof(out_BTHK).sharding.spec[:2])


def splits_heads(layer: Any, mesh: Any) -> bool:
    """Whether the mesh divides the layer's heads, and its key/value heads if there are several.

    Where it does not, every shard attends with all heads.
    """
    return _Partitions(layer, mesh).split


def cache_shardings(layer: nnx.Module, shapes: Any, mesh: Mesh) -> Any:
    """`NamedSharding` of every array of a layer's cache."""
    specs = _Partitions(layer, mesh).of_cache(shapes)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def constrain_cache(layer: nnx.Module, cache: Any) -> Any:
    """In a program: the cache where `cache_shardings` has it, on the mesh in use."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return cache
    specs = _Partitions(layer, mesh).of_cache(cache)
    return jax.tree.map(jax.lax.with_sharding_constraint, cache, specs)


class _Partitions:
    """The partitions of a layer's arrays on a mesh, by the layer's rules."""

    def __init__(self, layer, mesh):
        rules, free = _rules(layer), _free_axes(mesh)
        self._batch, self._heads = (
            tuple(axis for axis in mesh_axes_of(name, rules) if axis in free)
            for name in ("batch", "heads")
        )
        self._rows = math.prod(mesh.shape[axis] for axis in self._batch)
        sizes = {
            size
            for axes, shape in _weights(layer)
            for name, size in zip(axes, shape, strict=True)
            if name in HEADS and size > 1
        }
        devices = math.prod(mesh.shape[axis] for axis in self._heads)
        self.split = all(size % devices == 0 for size in (layer.config.heads, *sizes))

    def of(self, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """Sequences and heads over their mesh axes; a single one, and all else, stays whole."""

        def place(name, size):
            if name == "batch":
                return self._batch if size % self._rows == 0 else ()
            return self._heads if name in HEADS and self.split and size > 1 else ()

        # As the compiler writes the placement of its results: an equal one is no new program.
        places = [_written(place(*axis)) for axis in zip(axes, shape, strict=True)]
        while places and places[-1] is None:
            places.pop()
        return PartitionSpec(*places)

    def check_pool(self, sequences: int, cache: Any) -> None:
        """Raise `LrkvError` if only one is split: tables would name pages of another shard."""
        for pages in {len(array) for array in jax.tree.leaves(cache)}:
            if (sequences % self._rows == 0) != (pages % self._rows == 0):
                raise LrkvError(
                    f"{sequences} sequences and a pool of {pages} pages, on a mesh that splits "
                    f"both in {self._rows}: make each a multiple of {self._rows}"
                )

    def of_cache(self, cache: Any) -> Any:
        """The cache's dataclass, with the placement of each array that is there."""

        def of(name, array):
            axes = cache.AXES[name].split()  # scales of rows have all but the last
            return jax.tree.map(lambda part: self.of(axes[: part.ndim], part.shape), array)

        return type(cache)(**{name: of(name, array) for name, array in vars(cache).items()})


def _rules(layer):
    return RULES | dict(layer.axis_rules)


def _resharded(spec, arrays):
    return jax.tree.map(lambda array: jax.reshard(array, spec), arrays)


def _written(axes):
    """Mesh axes as the compiler writes them: none, one or several."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def _free_axes(mesh) -> tuple[str, ...]:
    """The axes of a mesh over which a program is not manual already."""
    manual = getattr(mesh, "manual_axes", ())
    return tuple(axis for axis in mesh.axis_names if axis not in manual)


def _weights(layer) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(axes, shape) of each weight, in the order of the layer's leaves."""
    return [(spec_of(v).axes, v.get_value().shape) for v in variables(layer)]
