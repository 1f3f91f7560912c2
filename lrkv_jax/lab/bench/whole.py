"""A whole layer's or a whole model's decode step, with random weights in the cache's dtype.

B batch  D model width
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lrkv_jax.config import ModelConfig
from lrkv_jax.lab.bench.problems import noise
from lrkv_jax.models.accounting.counts import parameter_counts
from lrkv_jax.models.attention import abstract_layer
from lrkv_jax.models.transformer import abstract_model, abstract_parameters, with_parameters


def compiled_layer(model: ModelConfig, batch: int, length: int, dtype: str):
    """The compiled decode of a layer: projections, cache write, attention, output.

    Called with (weights, x [B, 1, D], cache, lengths_B) it gives ([B, 1, D], cache); `lengths_B`
    counts what is cached before, and the cache is donated. It is compiled from shapes alone.
    """
    weights, tree = jax.tree.flatten(abstract_layer(model))

    def step(weights, x_B1D, cache, lengths_B):
        return jax.tree.unflatten(tree, weights).decode(x_B1D, cache, lengths_B)

    shapes = (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), weights),
        jax.ShapeDtypeStruct((batch, 1, model.width), dtype),
        abstract_layer(model).stored_shapes(batch, length, jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    return jax.jit(step, donate_argnums=2).lower(*shapes).compile()


def layer_program(
    model: ModelConfig, lengths_B, length: int, dtype: str, weights: Any
) -> tuple[Any, Callable]:
    """(compiled, program) of a layer; `program(cache)` gives (output, cache)."""
    compiled = compiled_layer(model, len(lengths_B), length, dtype)
    x_B1D = noise((len(lengths_B), 1, model.width), dtype, seed=99)
    before_B = jnp.asarray(lengths_B) - 1
    return compiled, lambda cache: compiled(weights, x_B1D, cache, before_B)


def model_program(model: ModelConfig, lengths_B, length: int, dtype: str) -> tuple[Any, Callable]:
    """(compiled, program) of a model: a token in, every layer, the head, the likeliest token out.

    `program((cache, token_B))` gives (token_B, (cache, token_B)).
    """
    batch = len(lengths_B)
    params = _random_like(abstract_parameters(model), dtype)
    unstacked = with_parameters(model, params).unstacked()

    def step(model, state, lengths_B):
        cache, token_B = state
        x_B1D, cache = model.decode(token_B[:, None], cache, lengths_B)
        token_B = jnp.argmax(model.logits(x_B1D)[:, 0], axis=-1).astype(jnp.int32)
        return token_B, (cache, token_B)

    state = jax.eval_shape(lambda: model_state(model, batch, length, dtype))
    before_B = jnp.asarray(lengths_B) - 1
    compiled = jax.jit(step, donate_argnums=1).lower(unstacked, state, before_B).compile()
    return compiled, lambda state: compiled(unstacked, state, before_B)


def model_state(model: ModelConfig, batch: int, length: int, dtype: str) -> tuple[Any, jax.Array]:
    """An empty cache of every layer, and a token of each sequence."""
    layer = abstract_model(model).blocks.attention
    caches = [layer.init_cache(batch, length, jnp.dtype(dtype)) for _ in range(model.layers)]
    return caches, jnp.zeros(batch, jnp.int32)


def model_nbytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of a model's weights at their peak: stacked, and a layer at a time beside it."""
    return 2 * parameter_counts(model).total * jnp.dtype(dtype).itemsize


def _random_like(shapes, dtype):
    """Small random weights: their values cost no time."""
    leaves, tree = jax.tree.flatten(shapes)
    make = jax.jit(lambda: [noise(a.shape, dtype, i, 0.02) for i, a in enumerate(leaves)])
    return tree.unflatten(make())
