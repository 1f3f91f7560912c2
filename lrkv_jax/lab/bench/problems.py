"""One layer's decode attention as data: random weights, queries and cache, and the right answer.

What is timed is the layer's `attend_cached`: each head's query in (normed and rotated, where
the variant rotates it), each head's output out. Products with up-projections that a factored cache
needs are therefore inside the measurement, for MLA (absorption) as for LRKV.

B batch  T new tokens (1)  S cache slots  H heads  K head width
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.kernels.int8 import Int8Rows
from lrkv_jax.kernels.online import padded
from lrkv_jax.models.attention import abstract_layer
from lrkv_jax.models.attention.cache import Cache, slot_axes
from lrkv_jax.models.weights import spec_of, variables


class DecodeInputs(NamedTuple):
    """A program's arguments, except for the cache and the lengths.

    `weights` are the layer's leaves, `query` what its `queries` gives, `angles` its `slot_angles`.
    """

    weights: Any
    query: Any
    angles: Any


@dataclass(frozen=True)
class DecodeProblem:
    """A decode problem: arguments, the layer's kind of cache, and the tokens in it."""

    model: ModelConfig
    inputs: DecodeInputs
    cache: Cache
    lengths_B: jax.Array


def bytes_to_move(cache: Cache, lengths_B: np.ndarray) -> int:
    """Bytes of a cache's slots that hold a token, padding included: a decode step reads them."""
    total = 0
    for name, axis in slot_axes(cache).items():
        leaf = getattr(cache, name)
        total += nbytes_of(leaf) // (leaf.shape[0] * leaf.shape[axis]) * int(lengths_B.sum())
    return total


def cache_nbytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Bytes of one cache of the problem, before it is made."""
    return nbytes_of(abstract_layer(model).stored_shapes(batch, length, jnp.dtype(dtype)))


def nbytes_of(arrays: Any) -> int:
    """Bytes of all arrays of a tree, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def lengths_of(batch: int, length: int, *, ragged: bool, seed: int) -> np.ndarray:
    """Tokens of each sequence: all `length`, or between 1 and that with a mean of half of it.

    Ragged lengths come in pairs that mirror each other around the half, so that the mean is exact
    in every draw and figures of different seeds compare.
    """
    if not ragged:
        return np.full(batch, length, np.int32)
    rng = np.random.default_rng(seed)
    half = rng.integers(1, length, batch // 2, endpoint=True)
    middle = [-(-length // 2)] * (batch % 2)
    lengths = np.concatenate([half, np.maximum(length - half, 1), middle])
    return rng.permutation(lengths).astype(np.int32)


def make_problem(
    model: ModelConfig, lengths_B: np.ndarray, length: int, dtype: str, seed: int
) -> DecodeProblem:
    """Random arrays of unit variance: logits of standard deviation about 1, weights far from equal.

    LRKV's residual carries half of a key's variance, so that leaving it out cannot go unnoticed.
    """
    layer, B, of = abstract_layer(model), len(lengths_B), jnp.dtype(dtype)
    x_B1D = jax.ShapeDtypeStruct((B, 1, model.width), of)
    positions_B1 = jax.ShapeDtypeStruct((B, 1), jnp.int32)
    queries, new_kv = jax.eval_shape(
        lambda layer, *inputs: (layer.queries(*inputs), layer.new_kv(*inputs)),
        layer, x_B1D, positions_B1,
    )  # fmt: skip
    shapes = layer.stored_shapes(B, length, of)
    axes = slot_axes(shapes)

    @jax.jit  # one program for all arrays: most of a small sweep is compilation
    def make(seed):
        # XLA's generator: a large cache is 10⁹ values, which threefry would take long for.
        keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 64))

        def stored(name):
            leaf, width = getattr(shapes, name), getattr(new_kv, name).shape[-1]
            if axes[name] == len(leaf.shape) - 1:  # a scalar per token: an inverse norm
                return 0.7 + 0.1 * _noise(next(keys), leaf.shape, leaf.dtype)
            rows = _noise(next(keys), (*leaf.shape[:-1], width), leaf.dtype)
            rows = padded(rows, rows.ndim - 1, leaf.shape[-1])
            return Int8Rows.of(rows, leaf.dtype) if isinstance(leaf, Int8Rows) else rows

        cache = type(shapes)(**{name: stored(name) for name in axes})
        query = jax.tree.map(lambda leaf: _noise(next(keys), leaf.shape, dtype), queries)
        return DecodeInputs(_weights(layer, dtype, keys), query, layer.slot_angles(length)), cache

    inputs, cache = make(jnp.uint32(seed))
    return DecodeProblem(model, inputs, cache, jnp.asarray(lengths_B))


def _weights(layer, dtype, keys):
    """The layer's weights, each of variance 1 / fan-in."""
    return [
        _noise(next(keys), leaf.shape, dtype, spec_of(variable).fans(leaf.shape)[0] ** -0.5)
        for variable, leaf in zip(variables(layer), jax.tree.leaves(layer), strict=True)
    ]


def _noise(key: jax.Array, shape: tuple[int, ...], dtype: str, std: float = 1.0) -> jax.Array:
    """Uniform numbers of mean 0."""
    bound = std * 3**0.5
    return jax.random.uniform(key, shape, jnp.dtype(dtype), -bound, bound)


def with_kernel(problem: DecodeProblem, inputs: DecodeInputs, cache: Cache, lengths_B, impl: str):
    """(outputs [B, T, H, K], log-sum-exp) as the layer decodes, through the kernel `impl`."""
    model = problem.model.model_copy(update={"decode_kernel": impl})
    layer = jax.tree.unflatten(jax.tree.structure(abstract_layer(model)), inputs.weights)
    return layer.attend_cached(inputs.query, cache, lengths_B[:, None] - 1, inputs.angles)


# Correctness before speed: what differs from the reference is not timed.

# Largest difference over the largest output. bfloat16: queries, weights and factors are rounded to
# 2⁻⁹ each. float32 on a GPU: XLA multiplies in TF32, 2⁻¹¹.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
TOLERANCE_TF32 = 5e-3


@dataclass(frozen=True)
class Reference:
    """Outputs [n, T, H, K] and log-sum-exp [n, T, H] of n sequences of a problem, in float32."""

    sequences: list[int]
    out: np.ndarray
    lse: np.ndarray

    def error(self, out: jax.Array, lse: jax.Array | None) -> float:
        """Largest difference over the largest output; NaN counts as infinite.

        The log-sum-exp, where there is one, is of order 1 to 10 and compared as it is.
        """
        got = np.asarray(out, np.float32)[self.sequences]
        worst = np.abs(got - self.out).max() / np.abs(self.out).max()
        if lse is not None:
            worst = max(worst, np.abs(np.asarray(lse, np.float32)[self.sequences] - self.lse).max())
        return float(worst) if np.isfinite(worst) else float("inf")


def tolerance(dtype: str) -> float:
    """The allowed error, relative to the largest output."""
    tf32 = dtype == "float32" and jax.default_backend() != "cpu"
    return TOLERANCE_TF32 if tf32 else TOLERANCE[dtype]


def reference_of(problem: DecodeProblem) -> Reference:
    """The answers for the shortest and the longest sequence, by XLA's kernel in float32.

    pytest holds that kernel against oracles in float64.
    """
    lengths_B = np.asarray(problem.lengths_B)
    sequences = sorted({int(lengths_B.argmin()), int(lengths_B.argmax())})

    @jax.jit
    def attend(inputs, cache, lengths_B, sequence):
        one = [jax.tree.map(_in_float32, tree) for tree in _of_one(inputs, cache, sequence)]
        length_B = jax.lax.dynamic_slice_in_dim(lengths_B, sequence, 1)
        with jax.default_matmul_precision("highest"):
            return with_kernel(problem, *one, length_B, "xla")

    arrays = problem.inputs, problem.cache, problem.lengths_B
    answers = [attend(*arrays, sequence) for sequence in sequences]
    out, lse = (np.concatenate(parts) for parts in zip(*answers, strict=True))
    return Reference(sequences, out, lse)


def _of_one(inputs: DecodeInputs, cache: Cache, sequence) -> tuple[DecodeInputs, Cache]:
    """The inputs of one sequence, and its cache."""

    def cut(tree):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, sequence, 1), tree)

    return inputs._replace(query=cut(inputs.query)), cut(cache)


def _in_float32(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
