"""A weight with its description: the meaning of each axis, its fan-in and fan-out, its group.

One line of layout serves initialization, sharding, Muon and the counts:

    weight("heads: embed -> rank", (H, D, R))

is a batch of H matrices from D inputs to R outputs. Sharding maps the axis names to mesh axes
(`lrkv_jax.distributed`); Muon orthogonalises each matrix of the batch (`lrkv_jax.optim`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

# What is `still` stays as it is.
Group = Literal["matrix", "embedding", "head", "vector", "still"]
LAYERS = "layers"  # the axis that stacks a block's weights over the model's layers


@dataclass(frozen=True)
class WeightSpec:
    """The meaning of an array's axes, in order: batch axes, then inputs, then outputs.

    `axes` names each axis; `batch` and `inputs` count the leading ones; `group` chooses the
    optimizer. A spec is a static leaf: trees of specs mirror trees of parameters.
    """

    axes: tuple[str, ...]
    batch: int
    inputs: int
    group: Group

    @classmethod
    def parse(cls, layout: str, group: Group = "matrix") -> WeightSpec:
        """Read "batch axes: input axes -> output axes"; the batch part may be absent."""
        batch, _, matrix = layout.rpartition(":")
        inputs, _, outputs = matrix.partition("->")
        parts = [part.split() for part in (batch, inputs, outputs)]
        return cls(tuple(sum(parts, [])), len(parts[0]), len(parts[1]), group)

    def stacked(self) -> WeightSpec:
        """The spec of such a weight for each layer, stacked."""
        return replace(self, axes=(LAYERS, *self.axes), batch=self.batch + 1)

    def fans(self, shape: Sequence[int]) -> tuple[int, int]:
        """Fan-in and fan-out of one matrix of the batch."""
        middle = self.batch + self.inputs
        return math.prod(shape[self.batch : middle]), math.prod(shape[middle:])


def weight(
    layout: str,
    shape: tuple[int, ...],
    *,
    std: float | None = None,
    group: Group = "matrix",
) -> nnx.Param:
    """A float32 parameter, its axes named by `layout`: zeros, and N(0, std²) after `draw`.

    `std=None` is 1/sqrt(fan_in) · min(1, sqrt(fan_out/fan_in)), nanochat's initialization.
    """
    spec = WeightSpec.parse(layout, group)
    if std is None:
        fan_in, fan_out = spec.fans(shape)
        std = min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in)
    return nnx.Param(jnp.zeros(shape, jnp.float32), spec=spec, std=std)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Columns:
    """Stands for a weight that `join` has laid into its module's matrix: where, and its shape."""

    start: int
    shape: tuple[int, ...]


def product(x: Array, module: Any, name: str) -> Array:
    """x [..., D] times the module's weight of this name, in x's dtype.

    The weight is [D, F, ...] or [G, D, R]; the product is [..., F, ...] or [..., G, R]. `join` may
    have laid it into one matrix with others.
    """
    weight = getattr(module, name)
    if not isinstance(weight, Columns):
        kernel = jnp.moveaxis(weight[...], weight.get_metadata("spec").batch, 0)
        return by_rows(x, kernel.astype(x.dtype))
    # XLA makes one product of those that have the same operands.
    joined = x @ module.joined[...].astype(x.dtype)
    end = weight.start + math.prod(weight.shape)
    return joined[..., weight.start : end].reshape(*x.shape[:-1], *weight.shape)


def by_rows(x: Array, kernel: Array, inputs: int = 1) -> Array:
    """x [..., D] times kernel [D, ...], as one product of two matrices; D is `inputs` axes.

    Where rows have several axes, XLA on a CPU copies and transposes an operand of each weight's
    gradient: without that an MLP of width 128 or 256 is 1.3 times as fast, both ways.
    """
    D = math.prod(kernel.shape[:inputs])
    kernel_DF = kernel.reshape(D, -1)
    if D > kernel_DF.shape[1] and jax.default_backend() == "cpu":
        kernel_DF = _transposed_gradient(kernel_DF)
    rows = x.reshape(-1, D) @ kernel_DF
    return rows.reshape(*x.shape[: x.ndim - inputs], *kernel.shape[inputs:])


# The identity. Where D > F a gradient is up to twice as fast computed as [F, D]; the barrier keeps
# XLA from swapping the operands of that product back.
_transposed_gradient = jax.custom_vjp(lambda kernel_DF: kernel_DF)
_transposed_gradient.defvjp(
    lambda kernel_DF: (kernel_DF, None),
    lambda _, gradient_DF: (jax.lax.optimization_barrier(gradient_DF.T).T,),
)


def join(module: Any) -> None:
    """Lay the weights that `module.joins` names side by side in one matrix [D, F], in place.

    All multiply the same x. For decoding on a CPU: a product of one row is read at the speed of
    memory if it is long, and each wakes the threads and waits for them. A base class's `joins` do
    not count: a subclass may use these weights otherwise.
    """
    start, matrices = 0, []
    joins = vars(type(module)).get("joins", ())
    names = [name for name in joins if getattr(module, name, None) is not None]
    for name in names if len(names) > 1 else ():
        weight = getattr(module, name)
        kernel = jnp.moveaxis(weight[...], weight.get_metadata("spec").batch, 0)
        setattr(module, name, Columns(start, kernel.shape[1:]))
        matrices.append(kernel.reshape(len(kernel), -1))
        start += matrices[-1].shape[1]
    if matrices:
        module.joined = nnx.Param(jnp.concatenate(matrices, axis=1))


def vector(axes: str, shape: tuple[int, ...], value: float) -> nnx.Param:
    """A float32 parameter that multiplies nothing from the left: gains (1), biases (0)."""
    names = tuple(axes.split())
    spec = WeightSpec(names, batch=0, inputs=len(names), group="vector")
    return nnx.Param(jnp.full(shape, value, jnp.float32), spec=spec)


def draw(module: nnx.Module, key: Key[Array, ""]) -> None:
    """Give the weights of a module their first numbers, in place.

    Each weight has a separate key: `key` folded with the weight's path in the module and, if the
    weight is stacked, with the layer. A weight therefore depends on `key`, its path, its layer and
    its shape alone: modules that differ elsewhere, even in depth, share it.
    """
    for path, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Param) or not variable.get_metadata().get("std"):
            continue
        spec, std = variable.get_metadata("spec"), variable.get_metadata("std")
        shape = variable.get_value().shape
        own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
        if len(shape) == len(spec.axes):
            value = jax.random.normal(own, shape, jnp.float32)
        else:
            keys = jax.vmap(partial(jax.random.fold_in, own))(jnp.arange(shape[0]))
            drawn = partial(jax.random.normal, shape=shape[1:], dtype=jnp.float32)
            value = jax.vmap(drawn)(keys)
        variable.set_value(std * value)


def variables(module: nnx.Module) -> list[nnx.Param]:
    """A module's weights with what is known of them, in the order of its leaves."""
    return jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def spec_of(variable: nnx.Param) -> WeightSpec:
    """A weight's spec as stored: with its layers axis where it has one."""
    spec = variable.get_metadata("spec")
    stacked = variable.get_value().ndim > len(spec.axes)
    return spec.stacked() if stacked else spec


def weights_of(module: nnx.Module) -> Any:
    """A module's weights as a nested dict of arrays.

    The module itself is a tree of the same leaves in the same order, for jit, grad and tree.map;
    the dict is what checkpoints, optimizers and people name them by.
    """
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def with_weights[M: nnx.Module](module: M, weights: Any) -> M:
    """The module around other weights, given as `weights_of` gives them."""
    return jax.tree.unflatten(jax.tree.structure(module), jax.tree.leaves(weights))


def name_axes(module: nnx.Module, rules: Sequence[tuple[str, Any]]) -> None:
    """Name the weights' axes as flax does, with rules for them; an axis without one stays whole.

    Without any rule flax takes those of its context. Nothing is placed before it is used.
    """
    named = {name for variable in variables(module) for name in spec_of(variable).axes}
    every = tuple({**dict.fromkeys(sorted(named)), **dict(rules)}.items())
    for variable in variables(module):
        variable.set_metadata(out_sharding=spec_of(variable).axes, eager_sharding=False)
        if rules:
            variable.set_metadata(sharding_rules=every)


def weight_specs(module: nnx.Module) -> Any:
    """The tree of `WeightSpec` that mirrors `weights_of(module)`."""
    tree = jax.tree.structure(weights_of(module))
    return jax.tree.unflatten(tree, map(spec_of, variables(module)))
