"""The token embedding and the head that turns a hidden state into logits."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.distributed.manual_sharding import look_up
from lrkv_jax.models.weight import weight


class Embedding(nnx.Module):
    """Token id → vector; N(0, 1) at the start."""

    def __init__(self, vocabulary: int, width: int):
        shape = (vocabulary, width)
        self.table = weight("vocabulary -> embed", shape, std=1.0, group="embedding")

    def __call__(self, tokens_BT: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        return look_up(self.table[...], tokens_BT).astype(dtype)


class Head(nnx.Module):
    """Hidden state → logits; zeros at the start, so the first loss is ln V."""

    def __init__(self, vocabulary: int, width: int):
        shape = (width, vocabulary)
        self.kernel = weight("embed -> vocabulary", shape, std=0, group="head")


def soft_cap(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """cap · tanh(logits / cap): logits stay inside ±cap; None leaves them alone."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
