"""The collectives of a training step, placed manually.

The loss and its gradient run in a `jax.shard_map` that is manual over data, fsdp and context: each
device sees its rows and positions, and its rows of every weight. Here are the few places
where devices meet:

- a layer's weights are gathered over fsdp, in the computation's dtype, in the layer's turn: once
  forward, once backward, and never kept between (`fsdp_layer`); their gradients go back as float32
  sums, reduce-scattered;
- tokens travel to the embedding's columns, not the table to the tokens (`look_up`);
- weights outside the layers are gathered where they are used (`gathered`).

Tensor parallelism stays with the compiler, which cannot split a collective that is placed manually:
`over_tensor` makes the region around one manual over `tensor` too.

Left to itself the compiler would sum a gradient over devices once a loss chunk and once a
microbatch, and gather activations where it finds them smaller than weights.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from lrkv_jax.distributed.rules import BATCH, CONTEXT, TENSOR, partition

MANUAL_AXES = (*BATCH, CONTEXT)
FSDP = "fsdp"  # the mesh axis that splits weights, along their axis of this name:
EMBED = "embed"

Axes = tuple[str, ...]

_IN_TRAIN_STEP = ContextVar("in_train_step", default=False)


def in_train_step() -> bool:
    """Whether this is traced inside the manual region of a training step, `train_step`'s.

    A layer that a user calls in another `jax.shard_map`, over axes of any name, is not.
    """
    return _IN_TRAIN_STEP.get()


def train_step(f: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """`f` as the manual region of a training step on this mesh."""

    def region(*arguments):
        before = _IN_TRAIN_STEP.set(True)
        try:
            return f(*arguments)
        finally:
            _IN_TRAIN_STEP.reset(before)

    return jax.shard_map(
        region, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
        axis_names=manual_axes(mesh), check_vma=False,
    )  # fmt: skip


def manual_axes(mesh: Mesh) -> set[str]:
    """The mesh axes over which a training step is manual: all, where tensor splits nothing."""
    return set(MANUAL_AXES if mesh.shape[TENSOR] > 1 else mesh.axis_names)


def manual_part(spec: PartitionSpec) -> PartitionSpec:
    """The part of a placement that the manual region sees."""

    def keep(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        manual = tuple(name for name in names if name in MANUAL_AXES)
        return manual or None

    return PartitionSpec(*map(keep, spec))


def over_tensor(f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`f` with every mesh axis manual, `tensor` included, split as the specs define."""
    if TENSOR in jax.sharding.get_abstract_mesh().manual_axes:  # a mesh of one tensor shard
        return f
    return jax.shard_map(
        f, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False
    )


def tensor_part(axes: Axes, shape: Sequence[int]) -> PartitionSpec:
    """How `tensor` splits a weight; `shape` may be that of a device's rows."""
    mesh = jax.sharding.get_abstract_mesh()
    places = partition(axes, shape, mesh)
    return PartitionSpec(*(place if place == TENSOR else None for place in places))


def size(axis: str) -> int:
    return jax.sharding.get_abstract_mesh().shape[axis]


def index(axis: str) -> jax.Array | int:
    """This device's place along a mesh axis."""
    return jax.lax.axis_index(axis) if size(axis) > 1 else 0


def first_position(positions: int) -> jax.Array | int:
    """Where this device's share of `positions` positions starts in the sequence."""
    return index(CONTEXT) * positions if in_train_step() else 0


# Weights.


def gather(shards: list, axes: Sequence[Axes], dtype: jnp.dtype) -> list:
    """Whole weights (except over `tensor`) from each device's rows, in the computation's dtype."""

    def local(shards):
        pairs = zip(shards, axes, strict=True)
        return [_gather(shard.astype(dtype), names) for shard, names in pairs]

    parts = [tensor_part(names, shard.shape) for names, shard in zip(axes, shards, strict=True)]
    return over_tensor(local, (parts,), parts)(shards)


def _gather(shard, names):
    if EMBED not in names or size(FSDP) == 1:
        return shard
    return jax.lax.all_gather(shard, FSDP, axis=names.index(EMBED), tiled=True)


def scatter(gradients: list, axes: Sequence[Axes], *, sums: bool) -> list:
    """Each device's rows of the gradients, float32, summed over fsdp; with `sums`, over all."""

    def local(gradients):
        pairs = zip(gradients, axes, strict=True)
        rows = [_scatter(gradient.astype(jnp.float32), names) for gradient, names in pairs]
        return sum_rest(rows, axes) if sums else rows

    parts = [tensor_part(names, g.shape) for names, g in zip(axes, gradients, strict=True)]
    return over_tensor(local, (parts,), parts)(gradients)


def _scatter(gradient, names):
    if EMBED not in names or size(FSDP) == 1:
        return gradient
    axis = names.index(EMBED)
    return jax.lax.psum_scatter(gradient, FSDP, scatter_dimension=axis, tiled=True)


def sum_rest(gradients: list, axes: Sequence[Axes]) -> list:
    """Sums over the mesh axes that no reduce-scatter went over: one all-reduce for each set."""
    out = list(gradients)
    for split in (True, False):
        over = tuple(a for a in MANUAL_AXES if size(a) > 1 and not (split and a == FSDP))
        which = [i for i, names in enumerate(axes) if (EMBED in names) == split]
        if over and which:
            for i, total in zip(which, jax.lax.psum([out[i] for i in which], over), strict=True):
                out[i] = total
    return out


def gathered(shards: list, axes: Sequence[Axes], dtype: jnp.dtype) -> list:
    """`gather`, as float32, so that gradients are.

    Those come back scattered, not yet summed over data and context.
    """

    @jax.custom_vjp
    def gathered(shards):
        return [weight.astype(jnp.float32) for weight in gather(shards, axes, dtype)]

    gathered.defvjp(
        lambda shards: (gathered(shards), None),
        lambda _, gradients: (scatter(gradients, axes, sums=False),),
    )
    return gathered(shards)


def fsdp_layer(f: Callable, axes: Sequence[Axes], *, sums: bool) -> Callable:
    """`f(x, weights, data)` as a function of the weights' shards, gathered for f's turn alone.

    x goes in and comes out in one shape; `data` (integers, or None) has no gradient. The backward
    pass gathers again what depends on weights alone, and reads everything else that `f`'s
    gradient keeps: no weight outlives its turn, and no activation is computed twice. Gradients of
    the shards are float32. With `sums` they are summed over data and context here; without, by a
    caller that accumulates microbatches.
    """

    @jax.custom_vjp
    def turn(x, shards, data):
        return f(x, gather(shards, axes, x.dtype), data)

    def forward(x, shards, data):
        weights = gather(shards, axes, x.dtype)
        out, backward_f, flags = _linearized(f, x, weights, data)
        leaves = jax.tree.leaves(backward_f)
        saved_leaves = [leaf for leaf, keep in zip(leaves, flags, strict=True) if keep]
        return out, (saved_leaves, shards, data)

    def backward(saved, gradient):
        saved_leaves, shards, data = saved
        if size(FSDP) > 1:
            # Else an unrolled scan finds the forward pass's gather again, and keeps it.
            shards, gradient = jax.lax.optimization_barrier((shards, gradient))
        weights = gather(shards, axes, gradient.dtype)
        # Only what does not depend on x is read from here: the rest is never computed.
        _, backward_f, flags = _linearized(f, jnp.zeros_like(gradient), weights, data)
        leaves, tree = jax.tree.flatten(backward_f)
        rest = iter(saved_leaves)
        leaves = [next(rest) if keep else leaf for leaf, keep in zip(leaves, flags, strict=True)]
        gradient_x, gradients = tree.unflatten(leaves)(gradient)
        return gradient_x, scatter(gradients, axes, sums=sums), None

    turn.defvjp(forward, backward)
    return turn


def _linearized(f: Callable, x: jax.Array, weights: list, data: Any) -> tuple:
    """f's result, its backward pass, and which leaves of that depend on x; f is traced once."""

    def both(x, weights):
        return jax.vjp(lambda x, weights: f(x, weights, data), x, weights)

    jaxpr, shapes = jax.make_jaxpr(both, return_shape=True)(x, weights)
    values = jaxpr_as_fun(jaxpr)(x, *weights)
    reached = _reached(jaxpr.jaxpr, [place == 0 for place in range(len(jaxpr.in_avals))])
    out, backward_f = jax.tree.unflatten(jax.tree.structure(shapes), values)
    return out, backward_f, reached[1:]  # the first is of the result


INLINE = ("jit", "pjit", "shard_map")  # calls whose inputs are their body's, one by one


def _reached(jaxpr, starts: list[bool]) -> list[bool]:
    reached = {var for var, start in zip(jaxpr.invars, starts, strict=True) if start}

    def is_reached(var):
        return isinstance(var, Var) and var in reached

    for equation in jaxpr.eqns:
        inputs = list(map(is_reached, equation.invars))
        if not any(inputs):
            continue
        inner = equation.params.get("jaxpr") if equation.primitive.name in INLINE else None
        inner = getattr(inner, "jaxpr", inner)
        outputs = _reached(inner, inputs) if inner else [True] * len(equation.outvars)
        reached.update(v for v, out in zip(equation.outvars, outputs, strict=True) if out)
    return list(map(is_reached, jaxpr.outvars))


# The embedding.


def look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows of a table whose columns are split over fsdp, for this device's tokens: [B, T, D].

    Every device looks up its columns for all tokens of its fsdp group: what travels is B · T · D
    values a device, not V · D, and the table's gradient stays where its columns are.
    """
    if not in_train_step() or size(FSDP) == 1:
        return table_VD[tokens_BT]
    everyones_BT = jax.lax.all_gather(tokens_BT, FSDP, axis=0, tiled=True)
    return jax.lax.all_to_all(table_VD[everyones_BT], FSDP, 0, 2, tiled=True)
