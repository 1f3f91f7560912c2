"""LRKV: keys and values of head h are x (W_shared + U_h B_hᵀ), cached as shared part and latents.

B batch  T new tokens  S cache slots  D model width  H heads  K head width
R residual rank (R_k of keys, R_v of values)

Three rope modes, each decoded exactly as it is trained (`lrkv_jax.kernels.lrkv_decode` has the
equations): `full` rotates the whole key; `shared` rotates the shared part, and the residual meets
the unrotated query; `latent` rotates the shared part in K dimensions and the latent in R. In each,
QK-norm divides by the rms of the whole unrotated key, one scalar n_h per token and head.

The paper's identity RoPE(K_h) = RoPE(K_shared) + RoPE(R_h) B_hᵀ holds in none of them.
LRKV (https://arxiv.org/abs/2601.11471), equations 2 to 7.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lrkv_jax.attention.base import Attention
from lrkv_jax.attention.cache import lengths_of
from lrkv_jax.attention.head_weights import HeadWeights, SharedResidual, by_head, in_float64
from lrkv_jax.config import ModelConfig
from lrkv_jax.kernels.lrkv_decode import Residual, lrkv_decode
from lrkv_jax.nn.norm import inverse_rms
from lrkv_jax.nn.rope import rope_angles
from lrkv_jax.nn.weight import weight

# FLOPs that take as long as one value more written and read, with its gradient. On two CPU cores
# (float32) the forms measure equal between 485 and 960; XLA's count of bytes for an H200 and the
# datasheet's ratio of FLOPs to bytes make it about 1,100 in bfloat16.
VALUE = 800


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankCache:
    """Shared key (rotated) and value, latents of each head, and float32 1/rms of each head's key.

    Latents are R wide, zero-padded to the entry's `cached_ranks`. `rk` is unrotated in the
    modes `full` and `shared`, rotated in R dimensions in `latent`. Rank 0 has no latents; a model
    without QK-norm has no inverse norms.
    """

    AXES: ClassVar[dict[str, str]] = {
        "k_shared_BSK": "batch slots head_width",
        "v_shared_BSK": "batch slots head_width",
        "rk_BSHR": "batch slots heads rank",
        "rv_BSHR": "batch slots heads rank",
        "inverse_norm_BHS": "batch heads slots",
    }

    k_shared_BSK: Float[Array, "B S K"]
    v_shared_BSK: Float[Array, "B S K"]
    rk_BSHR: Float[Array, "B S H R"] | None = None
    rv_BSHR: Float[Array, "B S H R"] | None = None
    inverse_norm_BHS: Float[Array, "B H S"] | None = None


class LowRankAttention(Attention):
    """A shared full-rank projection and a low-rank residual for each head, for keys and values."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        (R_k, R_v), self.rope = config.attention.ranks, config.attention.rope
        self.query = weight("embed -> heads head_width", (D, H, K))
        self.key = weight("embed -> head_width", (D, K))
        self.value = weight("embed -> head_width", (D, K))
        # σ_U = σ_W and σ_B = 0.1/sqrt(R) make ‖U Bᵀ‖ about 0.1 ‖W_shared‖ for every shape, of keys
        # and of values: E‖U Bᵀ‖² = D K R σ_U² σ_B² and E‖W‖² = D K σ_W².
        std = min(1.0, (K / D) ** 0.5) * D**-0.5
        if self.rank:
            down, up = "heads: embed -> rank", "heads: rank -> head_width"
            self.key_down = weight(down, (H, D, R_k), std=std)
            self.key_up = weight(up, (H, R_k, K), std=0.1 * R_k**-0.5)
            self.value_down = weight(down, (H, D, R_v), std=std)
            self.value_up = weight(up, (H, R_v, K), std=0.1 * R_v**-0.5)

    @property
    def rank(self) -> int:
        """R; at 0 this layer is MQA."""
        return self.config.attention.rank

    def queries(self, x_BTD, positions_BT):
        """The rotated query; in modes `shared` and `latent` also the unrotated one."""
        q_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, self.query[...].astype(x_BTD.dtype))
        q_BTHK = self.normed(q_BTHK)  # the rotation commutes with the norm
        rotated_BTHK = self.rotated(q_BTHK, positions_BT)
        return (rotated_BTHK, q_BTHK) if self._in_latents else (rotated_BTHK,)

    def entries(self, x_BTD, positions_BT):
        return self._entries(x_BTD, positions_BT)[0]

    def cached(self, query, cache, positions_BT, angles):
        residual = None
        if self.rank:
            residual = Residual(cache.rk_BSHR, cache.rv_BSHR, self.value_up[...])
            if self._in_latents:
                residual = residual._replace(q_latent_BTHR=self._latent(query[1], positions_BT))
            else:
                residual = residual._replace(up_key_HRK=self.key_up[...], angles_SK=angles)
        return lrkv_decode(
            query[0], cache.k_shared_BSK, cache.v_shared_BSK, residual,
            cache.inverse_norm_BHS, lengths_of(positions_BT),
            scale=self.scale, rope_base=self.config.rope_base,
            impl=self.config.decode_kernel, bits=self.config.decode_bits,
        )  # fmt: skip

    def materialised(self, cache, positions_BT):
        k_BSHK = cache.k_shared_BSK[:, :, None]
        if self.rank and not self._in_latents:
            residual_BSHK = self._raise(cache.rk_BSHR, self.key_up)
            k_BSHK = k_BSHK + self.rotated(residual_BSHK, positions_BT)
        return self._keys_values(k_BSHK, cache)

    def expanded(self, query, positions_BT):
        if not self._in_latents:
            return query[0]
        return jnp.concatenate([query[0], self._latent(query[1], positions_BT)], axis=-1)

    def slot_angles(self, slots):
        """[cos, sin] of each slot's position, [S, K], to rotate keys as they are read."""
        if not self.rank or self._in_latents:
            return None
        cos_sin = rope_angles(jnp.arange(slots), self.config.head_width, self.config.rope_base)
        return jnp.concatenate(cos_sin, axis=-1)

    def whole(self, x_BTD, positions_BT, attend):
        q_BTHW = self.expanded(self.queries(x_BTD, positions_BT), positions_BT)
        full, formed = self.rank and self.rope == "full", self.rank and self._forms_weights(x_BTD)
        k_BTHK = self._with_whole_weights(x_BTD, "key") if full and formed else None
        new, k_BTHK = self._entries(x_BTD, positions_BT, k_BTHK)
        k_BTHW, v_BTHK = self._keys_values(new.k_shared_BSK[:, :, None], new)
        if full:
            k_BTHW = self.normed(self.rotated(k_BTHK, positions_BT))
        if formed:
            v_BTHK = self._with_whole_weights(x_BTD, "value")
        return attend(q_BTHW, k_BTHW, v_BTHK), new

    def cache_shapes(self, batch, length, dtype):
        H, K, R = self.config.heads, self.config.head_width, self.rank
        shared = jax.ShapeDtypeStruct((batch, length, K), dtype)
        latents = [
            jax.ShapeDtypeStruct((batch, length, H, cached), dtype) if R else None
            for cached in self.config.attention.cached_ranks
        ]
        norm = jax.ShapeDtypeStruct((batch, H if R else 1, length), jnp.float32)
        return LowRankCache(shared, shared, *latents, norm if self.config.qk_norm else None)

    def head_weights(self):
        query_HDK, output_HKD = by_head(self.query), in_float64(self.output)
        if not self.rank:  # MQA: there are no parts
            shared = (
                np.broadcast_to(in_float64(w), query_HDK.shape) for w in (self.key, self.value)
            )
            return HeadWeights(query_HDK, *shared, output_HKD)
        key, value = (
            SharedResidual(
                in_float64(getattr(self, name)),
                in_float64(getattr(self, f"{name}_down")),
                in_float64(getattr(self, f"{name}_up")),
            )
            for name in ("key", "value")
        )
        return HeadWeights(
            query_HDK, key.total_HDK, value.total_HDK, output_HKD, key_parts=key, value_parts=value
        )

    @property
    def _in_latents(self) -> bool:
        """Whether queries meet the keys' latents in their own R coordinates."""
        return bool(self.rank) and self.rope != "full"

    def _latent(self, q_BTHK, positions_BT):
        """q B_h: the query in the latent's R coordinates, rotated there in mode `latent`."""
        up_HRK = self.key_up[...].astype(q_BTHK.dtype)
        q_BTHR = jnp.einsum("BTHK,HRK->BTHR", q_BTHK, up_HRK)
        return self.rotated(q_BTHR, positions_BT) if self.rope == "latent" else q_BTHR

    def _keys_values(self, k_BSHK, cache):
        """Each head's keys, from rotated ones before the norm (but for their latents), and values.

        In `full` the residual is in `k_BSHK`; in the other modes `k_BSHK` is the shared part, and
        this is one attention of width K + R: [shared, rotated ; residual, as a latent].
        """
        parts, v_BSHK = [k_BSHK], cache.v_shared_BSK[:, :, None]
        if self.rank:
            v_BSHK = v_BSHK + self._raise(cache.rv_BSHR, self.value_up)
            if self.rope != "full":
                rk_BSHR = cache.rk_BSHR[..., : self.key_up.shape[1]]
                shape = (*rk_BSHR.shape[:3], k_BSHK.shape[-1])
                parts = [jnp.broadcast_to(k_BSHK, shape), rk_BSHR]
        if cache.inverse_norm_BHS is not None:
            norm_BSH1 = cache.inverse_norm_BHS.swapaxes(1, 2)[..., None]
            parts = [(part * norm_BSH1).astype(v_BSHK.dtype) for part in parts]
        return jnp.concatenate(parts, axis=-1), v_BSHK

    def _raise(self, latent_BTHR, up):
        """Latent, padded or not → head width: the residual part of a key or value."""
        up_HRK = up[...].astype(latent_BTHR.dtype)
        latent_BTHR = latent_BTHR[..., : up_HRK.shape[1]]
        return jnp.einsum("BTHR,HRK->BTHK", latent_BTHR, up_HRK)

    def _forms_weights(self, x_BTD):
        """Whether training forms head weights W_h = W_shared + U_h B_hᵀ, once per layer and step.

        A key or a value of head h is then x W_h, and costs, forward and backward and over all
        heads, 6·D·H·K FLOPs per token and 6·D·H·R·K per layer. The factors, (x U_h) B_hᵀ +
        x W_shared, cost 6·(D·K + D·H·R + H·R·K) per token, but move about H·(R + K) values more:
        latents, and the sum of the two parts. Weights are formed where that is dearer:

            VALUE · H·(R + K)  >  6·(D·H·K − D·K − H·R·(D + K)) + 6·D·H·R·K / tokens

        Tokens and H are this device's own, and R is the mean of R_k and R_v. Wide models with R
        well below K keep the factors; small ones, and ranks near K, form the weights.
        """
        B, T, D = x_BTD.shape
        H, _, K = self.key_up[...].shape
        R = sum(self.config.attention.ranks) / 2
        saved = 6 * (D * H * K - D * K - H * R * (D + K)) + 6 * D * H * R * K / (B * T)
        return VALUE * H * (R + K) > saved

    def _with_whole_weights(self, x_BTD, name):
        """Each head's keys or values, unrotated, as x (W_shared + U_h B_hᵀ): [B, T, H, K]."""
        shared_DK, down_HDR, up_HRK = (
            getattr(self, weight)[...] for weight in (name, f"{name}_down", f"{name}_up")
        )
        residual_DHK = jnp.einsum(
            "HDR,HRK->DHK", down_HDR, up_HRK, preferred_element_type=jnp.float32
        )
        weight_DHK = (shared_DK[:, None] + residual_DHK).astype(x_BTD.dtype)
        return jnp.einsum("BTD,DHK->BTHK", x_BTD, weight_DHK)

    def _entries(self, x_BTD, positions_BT, k_BTHK=None):
        """Cache entries of each token, and its whole unrotated key, never cached: [B, T, H, K].

        The key is made from the factors unless it is given. At rank 0 all heads have one key, and
        H is 1.
        """
        dtype = x_BTD.dtype
        k_shared_BTK = x_BTD @ self.key[...].astype(dtype)
        v_shared_BTK = x_BTD @ self.value[...].astype(dtype)
        rk_BTHR = rv_BTHR = norm_BHT = None
        if self.rank:
            rk_BTHR = jnp.einsum("BTD,HDR->BTHR", x_BTD, self.key_down[...].astype(dtype))
            rv_BTHR = jnp.einsum("BTD,HDR->BTHR", x_BTD, self.value_down[...].astype(dtype))
        if k_BTHK is None:
            k_BTHK = k_shared_BTK[:, :, None]
            if self.rank:
                k_BTHK = k_BTHK + self._raise(rk_BTHR, self.key_up)
        if self.config.qk_norm:
            norm_BHT = inverse_rms(k_BTHK, self.config.norm_eps).swapaxes(1, 2)
        if self.rank and self.rope == "latent":
            rk_BTHR = self.rotated(rk_BTHR, positions_BT)
        k_rotated_BTK = self.rotated(k_shared_BTK[:, :, None], positions_BT)[:, :, 0]
        return LowRankCache(k_rotated_BTK, v_shared_BTK, rk_BTHR, rv_BTHR, norm_BHT), k_BTHK
