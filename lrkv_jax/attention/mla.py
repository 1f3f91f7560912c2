"""MLA: one latent per token, expanded into each head's keys and values, and one rope key.

B batch  T new tokens  S cache slots  D model width  H heads  K head width
C latent width  P rope-key width

c = norm(x W_down);  k_h = [c W_up,h ; norm(rope(x W_r))];  v_h = c W'_up,h;  a head's query is
[K without rope ; P with rope], each part normed. The expanded keys carry no norm: absorption,
q · (c W_up) = (q W_upᵀ) · c, needs them linear in c.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lrkv_jax.attention.base import Attention
from lrkv_jax.attention.cache import lengths_of
from lrkv_jax.attention.head_weights import HeadWeights, by_head, in_float64
from lrkv_jax.config import ModelConfig
from lrkv_jax.kernels.latent_decode import latent_decode
from lrkv_jax.nn.norm import rms_norm
from lrkv_jax.nn.weight import weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """The normed latent and the rotated, normed rope key, both shared by all heads."""

    AXES: ClassVar[dict[str, str]] = {
        "latent_BSC": "batch slots latent",
        "rope_key_BSP": "batch slots rope",
    }

    latent_BSC: Float[Array, "B S C"]
    rope_key_BSP: Float[Array, "B S P"]


class LatentAttention(Attention):
    """Multi-head latent attention; decoding is absorbed: queries move into the latent."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        C, P = config.attention.latent, config.attention.rope_width
        self.query = weight("embed -> heads head_width", (D, H, K))
        self.down = weight("embed -> latent", (D, C))
        self.up_key = weight("latent -> heads head_width", (C, H, K))
        self.up_value = weight("latent -> heads head_width", (C, H, K))
        # P = 0 has no positions at all: there is then nothing to learn here.
        self.query_rope = weight("embed -> heads rope", (D, H, P)) if P else None
        self.rope_key = weight("embed -> rope", (D, P)) if P else None

    def queries(self, x_BTD, positions_BT):
        """Parts without and with positions: [B, T, H, K] and [B, T, H, P]."""
        q_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, self.query[...].astype(x_BTD.dtype))
        if self.query_rope is None:
            return self.normed(q_BTHK), q_BTHK[..., :0]
        q_BTHP = jnp.einsum("BTD,DHP->BTHP", x_BTD, self.query_rope[...].astype(x_BTD.dtype))
        return self.normed(q_BTHK), self.normed(self.rotated(q_BTHP, positions_BT))

    def entries(self, x_BTD, positions_BT):
        latent_BTC = rms_norm(x_BTD @ self.down[...].astype(x_BTD.dtype), self.config.norm_eps)
        if self.rope_key is None:
            return LatentCache(latent_BTC, latent_BTC[..., :0])
        key_BTP = x_BTD @ self.rope_key[...].astype(x_BTD.dtype)
        rotated_BTP = self.rotated(key_BTP[:, :, None], positions_BT)[:, :, 0]
        return LatentCache(latent_BTC, self.normed(rotated_BTP))

    def cached(self, query, cache, positions_BT, angles):
        q_BTHK, q_BTHP = query
        dtype = q_BTHK.dtype
        q_BTHC = jnp.einsum("BTHK,CHK->BTHC", q_BTHK, self.up_key[...].astype(dtype))
        mean_BTHC, lse_BTH = latent_decode(
            q_BTHC, q_BTHP, cache.latent_BSC, cache.rope_key_BSP, lengths_of(positions_BT),
            scale=self.scale, impl=self.config.decode_kernel, bits=self.config.decode_bits,
        )  # fmt: skip
        out_BTHK = jnp.einsum(
            "BTHC,CHK->BTHK", mean_BTHC.astype(dtype), self.up_value[...].astype(dtype)
        )
        return out_BTHK, lse_BTH

    def materialised(self, cache, positions_BT):
        latent_BSC = cache.latent_BSC
        k_BSHK, v_BSHK = (
            jnp.einsum("BSC,CHK->BSHK", latent_BSC, up[...].astype(latent_BSC.dtype))
            for up in (self.up_key, self.up_value)
        )
        shape = (*k_BSHK.shape[:3], cache.rope_key_BSP.shape[-1])
        rope_BSHP = jnp.broadcast_to(cache.rope_key_BSP[:, :, None], shape)
        return jnp.concatenate([k_BSHK, rope_BSHP], axis=-1), v_BSHK

    def expanded(self, query, positions_BT):
        return jnp.concatenate(query, axis=-1)

    def cache_shapes(self, batch, length, dtype):
        C, P = self.config.attention.latent, self.config.attention.rope_width
        rows = [jax.ShapeDtypeStruct((batch, length, width), dtype) for width in (C, P)]
        return LatentCache(*rows)

    @property
    def scale(self) -> float:
        """1 / sqrt(K + P)."""
        return self.config.attention.query_width(self.config) ** -0.5

    def head_weights(self):
        down_DC, positions = in_float64(self.down), {}
        if self.rope_key is not None:
            positions["query_rope_HDP"] = by_head(self.query_rope)
            positions["rope_key_DP"] = in_float64(self.rope_key)
        return HeadWeights(
            by_head(self.query), down_DC @ by_head(self.up_key), down_DC @ by_head(self.up_value),
            in_float64(self.output), **positions,
        )  # fmt: skip
