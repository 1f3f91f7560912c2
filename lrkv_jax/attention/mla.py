"""MLA: one latent per token, expanded into each head's keys and values.

B batch  T new tokens  S cache slots  D model width  H heads  K head width
C latent width  P rope-key width  W width of a logit

c = norm(x W_down), C wide; v_h = c W^V_h. Positions enter in one of three modes, each decoded
exactly as it is trained (`lrkv_jax.kernels.latent_decode` has the equations):

    decoupled  k_h = [c W^K_h ; norm(rope(x W_r))], one rope key beside the latent. A head's query
               is [K without rope ; P with rope], each part normed. The expanded keys carry no norm:
               q · (c W^K_h) = (q W^K_hᵀ) · c needs them linear in c. DeepSeek's.
    full       k_h = norm(rope(c W^K_h)), the query normed and rotated as MHA's. Cached are c and
               n_h = 1/rms(c W^K_h), a float32 scalar per token and head.
    latent     k = rope(c), in C dimensions and for all heads; the query is norm(rope(q W^K_hᵀ)),
               C wide. c is normed as it is. Cached is c, which is rotated as it is read. An odd
               last coordinate carries no position.

Logits are scaled by 1/sqrt(W), of the width in which queries and keys are normed: K + P, K and C.

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
from lrkv_jax.kernels.latent_decode import Rotation, latent_decode
from lrkv_jax.nn.norm import inverse_rms, rms_norm
from lrkv_jax.nn.rope import rope_angles
from lrkv_jax.nn.weight import weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """The normed latent, unrotated, which all heads share.

    In mode `decoupled` also the rope key, rotated and normed, which they share too; in `full`
    float32 1/rms of each head's key, unless the model has no QK-norm.
    """

    AXES: ClassVar[dict[str, str]] = {
        "latent_BSC": "batch slots latent",
        "rope_key_BSP": "batch slots rope",
        "inverse_norm_BHS": "batch heads slots",
    }

    latent_BSC: Float[Array, "B S C"]
    rope_key_BSP: Float[Array, "B S P"] | None = None
    inverse_norm_BHS: Float[Array, "B H S"] | None = None


class LatentAttention(Attention):
    """Multi-head latent attention; decoding is absorbed: queries move into the latent."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        C, P = config.attention.latent, config.attention.rope_width
        self.rope = config.attention.rope
        self.query = weight("embed -> heads head_width", (D, H, K))
        self.down = weight("embed -> latent", (D, C))
        self.up_key = weight("latent -> heads head_width", (C, H, K))
        self.up_value = weight("latent -> heads head_width", (C, H, K))
        # Without a rope key there is nothing to learn here.
        self.query_rope = weight("embed -> heads rope", (D, H, P)) if P else None
        self.rope_key = weight("embed -> rope", (D, P)) if P else None

    def queries(self, x_BTD, positions_BT):
        """[B, T, H, K]; in mode `latent` before its norm and rotation, which are in the latent.

        In `decoupled` a pair: the part without positions, and the part with them, [B, T, H, P].
        """
        q_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, self.query[...].astype(x_BTD.dtype))
        if self.rope == "latent":
            return q_BTHK
        if self.rope == "full":
            return self.normed(self.rotated(q_BTHK, positions_BT))
        if self.query_rope is None:
            return self.normed(q_BTHK), q_BTHK[..., :0]
        q_BTHP = jnp.einsum("BTD,DHP->BTHP", x_BTD, self.query_rope[...].astype(x_BTD.dtype))
        return self.normed(q_BTHK), self.normed(self.rotated(q_BTHP, positions_BT))

    def entries(self, x_BTD, positions_BT):
        latent_BTC = rms_norm(x_BTD @ self.down[...].astype(x_BTD.dtype), self.config.norm_eps)
        if self.rope == "full" and self.config.qk_norm:
            norm_BTH = inverse_rms(self._raised(latent_BTC, self.up_key), self.config.norm_eps)
            return LatentCache(latent_BTC, inverse_norm_BHS=norm_BTH.swapaxes(1, 2))
        if self.rope != "decoupled":
            return LatentCache(latent_BTC)
        if self.rope_key is None:
            return LatentCache(latent_BTC, latent_BTC[..., :0])
        key_BTP = x_BTD @ self.rope_key[...].astype(x_BTD.dtype)
        return LatentCache(latent_BTC, self.normed(self._rotated_for_all(key_BTP, positions_BT)))

    def cached(self, query, cache, positions_BT, angles):
        rotation, q_BTHP = None, None
        if self.rope == "decoupled":
            q_BTHK, q_BTHP = query
            query = self._lowered(q_BTHK)
        elif self.rope == "latent":
            query, rotation = self.expanded(query, positions_BT), Rotation(angles)
        else:
            rotation = Rotation(angles, self.up_key[...], cache.inverse_norm_BHS)
        mean_BTHC, lse_BTH = latent_decode(
            query, q_BTHP, cache.latent_BSC, cache.rope_key_BSP, rotation,
            lengths_of(positions_BT), scale=self.scale, rope_base=self.config.rope_base,
            impl=self.config.decode_kernel, bits=self.config.decode_bits,
        )  # fmt: skip
        return self._raised(mean_BTHC.astype(query.dtype), self.up_value, "BTHC"), lse_BTH

    def materialised(self, cache, positions_BT):
        latent_BSC = cache.latent_BSC
        v_BSHK = self._raised(latent_BSC, self.up_value)
        if self.rope == "latent":
            k_BSC = self._rotated_for_all(latent_BSC, positions_BT)
            return self._to_heads(k_BSC, v_BSHK), v_BSHK
        k_BSHK = self._raised(latent_BSC, self.up_key)
        if self.rope == "full":
            k_BSHK = self.rotated(k_BSHK, positions_BT)
            if cache.inverse_norm_BHS is not None:
                norm_BSH1 = cache.inverse_norm_BHS.swapaxes(1, 2)[..., None]
                k_BSHK = (k_BSHK * norm_BSH1).astype(v_BSHK.dtype)
            return k_BSHK, v_BSHK
        rope_BSHP = self._to_heads(cache.rope_key_BSP, v_BSHK)
        return jnp.concatenate([k_BSHK, rope_BSHP], axis=-1), v_BSHK

    def expanded(self, query, positions_BT):
        if self.rope == "latent":
            return self.normed(self.rotated(self._lowered(query), positions_BT))
        return jnp.concatenate(query, axis=-1) if self.rope == "decoupled" else query

    def slot_angles(self, slots):
        """[cos, sin] of each slot's position, [S, K] or [S, C], to rotate keys as they are read."""
        if self.rope == "decoupled":
            return None
        width = self.config.attention.logit_width(self.config)
        return jnp.concatenate(
            rope_angles(jnp.arange(slots), width, self.config.rope_base), axis=-1
        )

    def whole(self, x_BTD, positions_BT, attend):
        if self.rope != "full":
            return super().whole(x_BTD, positions_BT, attend)
        new = self.entries(x_BTD, positions_BT)
        k_BTHK = self.normed(self.rotated(self._raised(new.latent_BSC, self.up_key), positions_BT))
        v_BTHK = self._raised(new.latent_BSC, self.up_value)
        return attend(self.queries(x_BTD, positions_BT), k_BTHK, v_BTHK), new

    def cache_shapes(self, batch, length, dtype):
        C, P = self.config.attention.latent, self.config.attention.rope_width
        latent, rope_key = (jax.ShapeDtypeStruct((batch, length, n), dtype) for n in (C, P))
        if self.rope == "decoupled":
            return LatentCache(latent, rope_key)
        if self.rope == "latent" or not self.config.qk_norm:
            return LatentCache(latent)
        norm = jax.ShapeDtypeStruct((batch, self.config.heads, length), jnp.float32)
        return LatentCache(latent, inverse_norm_BHS=norm)

    @property
    def scale(self) -> float:
        """1 / sqrt(width of a logit)."""
        return self.config.attention.logit_width(self.config) ** -0.5

    def head_weights(self):
        down_DC, positions = in_float64(self.down), {}
        if self.rope_key is not None:
            positions["query_rope_HDP"] = by_head(self.query_rope)
            positions["rope_key_DP"] = in_float64(self.rope_key)
        return HeadWeights(
            by_head(self.query), down_DC @ by_head(self.up_key), down_DC @ by_head(self.up_value),
            in_float64(self.output), **positions,
        )  # fmt: skip

    def _lowered(self, q_BTHK):
        """q W^K_hᵀ: the query in the latent's coordinates."""
        return jnp.einsum("BTHK,CHK->BTHC", q_BTHK, self.up_key[...].astype(q_BTHK.dtype))

    def _raised(self, latent, up, axes="BTC"):
        """Latents, or each head's mean of them, as keys or values of each head."""
        return jnp.einsum(f"{axes},CHK->BTHK", latent, up[...].astype(latent.dtype))

    def _rotated_for_all(self, key_BTW, positions_BT):
        """A key that all heads share, rotated."""
        return self.rotated(key_BTW[:, :, None], positions_BT)[:, :, 0]

    def _to_heads(self, key_BSW, v_BSHK):
        """A key that all heads share, for each of the values' heads."""
        return jnp.broadcast_to(key_BSW[:, :, None], (*v_BSHK.shape[:3], key_BSW.shape[-1]))
