"""The contract of an attention layer: train on whole sequences, decode from a cache.

A variant supplies, in this order in its file: its parameters, `whole` (what it computes, and what
each token leaves in the cache), `cached` (the same from the cache, for a few new tokens) and
`materialised` (the cache's keys and values of each head, for many). The rest is here, once.

B batch  T new tokens  S cache slots  D model width  H heads  K head width
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.head_weights import HeadWeights
from lrkv_jax.attention.on_mesh import on_mesh
from lrkv_jax.attention.tiles import attend_tiles
from lrkv_jax.attention.whole_sequences import attend_whole, on_tensor
from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.flash import causal_attention
from lrkv_jax.kernels.split_kv.plan import MOST_QUERIES
from lrkv_jax.nn.norm import rms_norm
from lrkv_jax.nn.rope import rope_angles, rotate
from lrkv_jax.nn.weight import weight

# A cache is a dataclass of arrays [B, S, ...], or [B, H, S] for what `SLOTS_LAST` names. Its static
# `AXES` names the axes of each array; `lrkv_jax.attention.on_mesh` splits them over a mesh.
Cache = Any


class Attention(nnx.Module):
    """One layer of attention: x [B, T, D] → [B, T, D].

    Slot s of a sequence's cache holds its token at position s, so a cache of S slots serves
    sequences of up to S tokens, each with its own length.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Make the output projection, zero at the start, that all variants share."""
        self.config = config
        shape = (config.heads, config.head_width, config.width)
        self.output = weight(rngs, "heads head_width -> embed", shape, std=0)

    # What a variant supplies.

    def whole(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        attend: Callable[..., Float[Array, "B T H K"]],
    ) -> tuple[Float[Array, "B T H K"], Cache]:
        """Heads' outputs of causal attention over the sequence itself, and its cache entries.

        `attend(q [B, T, H, W], k [B, T, G, W], v [B, T, G, K])` is `causal_attention`, wherever the
        sequence's positions lie; H and G are what this device has. The entries are the cache's own
        dataclass with T slots; training never uses them, and the compiler drops their computation.
        """
        raise NotImplementedError

    def cached(
        self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"], cache: Cache
    ) -> tuple[Float[Array, "B T H K"], Cache]:
        """Heads' outputs for new tokens at `positions_BT`, and the cache with them in it."""
        raise NotImplementedError

    def queries(
        self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T H W"]:
        """The queries of `whole`: those that meet materialised keys."""
        raise NotImplementedError

    def entries(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]) -> Cache:
        """What each token leaves in the cache."""
        raise NotImplementedError

    def materialised(
        self, cache: Cache, positions_BT: Int[Array, "1 S"]
    ) -> tuple[Float[Array, "B S G W"], Float[Array, "B S G K"]]:
        """The keys and values of the heads (or of groups of heads) that these slots stand for."""
        raise NotImplementedError

    def cache_shapes(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """The cache as `jax.ShapeDtypeStruct`s."""
        raise NotImplementedError

    def head_weights(self) -> HeadWeights:
        """Each head's matrices in float64, as if it shared none with another."""
        raise NotImplementedError

    # What every variant then has.

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attend over whole sequences; tokens of different segments never see each other."""
        return self._project(on_tensor(Attention.heads, self, x_BTD, positions_BT, segments_BT))

    def heads(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T H K"]:
        """The heads' outputs that `__call__` projects; in a training step, this device's heads'."""
        key_heads = self.config.attention.key_heads(self.config)
        attend = partial(
            attend_whole, scale=self.scale, segments_BT=segments_BT, key_heads=key_heads,
            impl=self.config.train_kernel,
        )  # fmt: skip
        return self.whole(x_BTD, positions_BT, attend)[0]

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens."""
        shapes = self.cache_shapes(batch, length, dtype)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def prefill(
        self, x_BTD: Float[Array, "B T D"], cache: Cache
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Attend over prompts from position 0 and fill slots 0 to T − 1.

        Shorter prompts are padded at the end: a later token never reads the padding, because
        decoding overwrites those slots before its position reaches them.
        """
        B, T, _ = x_BTD.shape
        self._check(cache, B)
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        out_BTHK, cache = on_mesh(Attention._prompt, self, x_BTD, positions_BT, cache)
        return self._project(out_BTHK), cache

    def decode(
        self, x_BTD: Float[Array, "B T D"], cache: Cache, lengths_B: Int[Array, "B"]
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Attend T new tokens a sequence, after `lengths_B` cached ones, and cache them.

        Up to `MOST_QUERIES` of them read the cache as it lies, in the decode kernel. For more, as
        when a prompt is prefilled in chunks, making each head's keys once costs less than meeting
        the factors once a query. Raises `LrkvError` for a cache that this layer would not make.
        """
        T = x_BTD.shape[1]
        self._check(cache, x_BTD.shape[0])
        positions_BT = lengths_B[:, None] + jnp.arange(T)
        attend = type(self).cached if T <= MOST_QUERIES else Attention._many
        out_BTHK, cache = on_mesh(attend, self, x_BTD, positions_BT, cache)
        return self._project(out_BTHK), cache

    def cache_bytes_per_token(self, dtype: jnp.dtype) -> int:
        """Bytes that a token occupies in this layer's cache."""
        leaves = jax.tree.leaves(self.cache_shapes(1, 1, dtype))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    # What variants share.

    @property
    def scale(self) -> float:
        """1 / sqrt(width of a query)."""
        return self.config.head_width**-0.5

    def normed(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        """QK-norm: gain-free RMSNorm over the last axis, if the model has it."""
        return rms_norm(x, self.config.norm_eps) if self.config.qk_norm else x

    def rotated(
        self, x_BTHK: Float[Array, "B T H K"], positions_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T H K"]:
        """RoPE over the last axis at each token's position."""
        cos, sin = rope_angles(positions_BT, x_BTHK.shape[-1], self.config.rope_base)
        return rotate(x_BTHK, cos[:, :, None], sin[:, :, None])

    def _check(self, cache, batch):
        """Raise `LrkvError` unless this layer makes such caches for `batch` sequences."""
        own = self.cache_shapes(batch, 1, jnp.float32)
        if type(cache) is not type(own):
            raise LrkvError(
                f"the cache is a {type(cache).__name__}, and this layer's is a "
                f"{type(own).__name__}: make it with this model's init_cache"
            )
        name, first = next((n, a) for n, a in vars(cache).items() if a is not None)
        length = first.shape[cache.AXES[name].split().index("slots")]
        for name, leaf in vars(self.cache_shapes(batch, length, first.dtype)).items():
            ours, theirs = (
                a and f"{a.dtype}{list(a.shape)}" for a in map(_shape, (leaf, vars(cache)[name]))
            )
            if ours != theirs or not jnp.issubdtype(first.dtype, jnp.floating):
                raise LrkvError(
                    f"the cache's {name} is {theirs}, and this layer's is {ours} in its own "
                    "dtype: make it with this model's init_cache"
                )

    def _prompt(self, x_BTD, positions_BT, cache):
        attend = partial(causal_attention, scale=self.scale)
        out_BTHK, entries = self.whole(x_BTD, positions_BT, attend)
        return out_BTHK, write(cache, entries, positions_BT)

    def _many(self, x_BTD, positions_BT, cache):
        """`cached` for many new tokens: keys and values exist for a tile of slots at a time."""
        q_BTHW = self.queries(x_BTD, positions_BT)
        cache = write(cache, self.entries(x_BTD, positions_BT), positions_BT)
        out_BTHK = attend_tiles(
            q_BTHW, cache, self.materialised, lengths_of(positions_BT), scale=self.scale
        )
        return out_BTHK.astype(x_BTD.dtype), cache

    def _project(self, out_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        return jnp.einsum("BTHK,HKD->BTD", out_BTHK, self.output[...].astype(out_BTHK.dtype))


def _shape(array):
    return None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)


def write(cache: Cache, entries: Cache, positions_BT: Int[Array, "B T"]) -> Cache:
    """Put each new token's entries into the slots that `positions_BT` names.

    A position past the last slot writes nothing; callers check lengths before they start.
    """
    rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
    last = getattr(cache, "SLOTS_LAST", ())

    def put(name: str) -> Array:
        old, new = getattr(cache, name), getattr(entries, name).astype(getattr(cache, name).dtype)
        # Rows that the cache pads are padded here, a token at a time.
        extra = old.shape[-1] - new.shape[-1] if name not in last else 0
        new = jnp.pad(new, [(0, 0)] * (new.ndim - 1) + [(0, extra)])
        if name in last:
            # Indices split by a slice move to the front: the update is [B, T, H].
            return old.at[rows_B1, :, positions_BT].set(new.swapaxes(1, 2))
        return old.at[rows_B1, positions_BT].set(new)

    return type(cache)(**{name: put(name) for name in vars(cache) if vars(cache)[name] is not None})


def lengths_of(positions_BT: Int[Array, "B T"]) -> Int[Array, "B"]:
    """Tokens of each sequence, the new ones included: what the decode kernels count."""
    return positions_BT[:, -1] + 1
