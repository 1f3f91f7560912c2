"""LRKV: keys and values of head h are x (W_shared + U_h B_hᵀ), cached as shared part and latents.

B batch  T new tokens  S cache slots  D model width  H heads  K head width
R residual rank (R_k of keys, R_v of values)  G residuals, one for each H / G query heads

Four rope modes, each decoded exactly as it is trained (`lrkv_jax.kernels.lrkv_decode` has the
equations): `full` rotates the whole key; `shared` rotates the shared part, and the residual meets
the unrotated query; `latent` rotates the shared part in K dimensions and the latent in R; `none`
rotates nothing, and the paper's equations 6 and 7 hold as printed. In each, QK-norm divides by the
rms of the whole unrotated key, one scalar n_h per token and head.

With `latent_norm: joint`, `shared` has no QK-norm. A token's latent [r^K of all heads | r^V of all
heads | v_shared] is divided by its root mean square instead. This is DeepSeek's MLA: RoPE(k_shared)
is the rope key, and head h's W^UK and W^UV are zero except where its latents and v_shared lie.

The paper's identity RoPE(K_h) = RoPE(K_shared) + RoPE(R_h) B_hᵀ does not hold of a key that is
rotated whole, `full`; made a model's definition, with queries rotated likewise, it is `latent`.
LRKV (https://arxiv.org/abs/2601.11471), equations 2 to 7.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lrkv_jax.config import ModelConfig
from lrkv_jax.distributed import manual_sharding
from lrkv_jax.distributed.rules import TENSOR
from lrkv_jax.kernels.lrkv_decode import Residual, lrkv_decode
from lrkv_jax.models.attention.base import Attention
from lrkv_jax.models.attention.cache import lengths_of, with_one
from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual, by_head, in_float64
from lrkv_jax.models.attention.on_mesh import heads_axes
from lrkv_jax.models.layers import biased, gained, inverse_rms
from lrkv_jax.models.weights import product, weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankCache:
    """Shared key (gained, rotated) and value, each residual's latents, float32 1/rms of its key.

    Latents are R wide, and of keys with biases R + 1 (the last is 1), zero-padded to the entry's
    `cached_ranks`. `rk` is rotated in R dimensions in the mode `latent`, and in no other. Rank 0
    has no latents. Without QK-norm there are no inverse norms; with the joint norm, latents and the
    value are normed.
    """

    AXES: ClassVar[dict[str, str]] = {
        "k_shared_BSK": "batch slots head_width",
        "v_shared_BSK": "batch slots head_width",
        "rk_BSGR": "batch slots kv_heads rank",
        "rv_BSGR": "batch slots kv_heads rank",
        "inverse_norm_BGS": "batch kv_heads slots",
    }
    INT8: ClassVar[tuple[str, ...]] = ("rk_BSGR", "rv_BSGR")

    k_shared_BSK: Float[Array, "B S K"]
    v_shared_BSK: Float[Array, "B S K"]
    rk_BSGR: Float[Array, "B S G R"] | None = None
    rv_BSGR: Float[Array, "B S G R"] | None = None
    inverse_norm_BGS: Float[Array, "B G S"] | None = None


class LowRankAttention(Attention):
    """A shared full-rank projection and low-rank residuals, for keys and for values.

    Each head, or each group of heads, has a separate residual.
    """

    joins = ("query", "key", "value", "key_down", "value_down")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        self.rope, self.rank = config.attention.rope, config.attention.rank
        R_k, R_v = config.attention.ranks
        self.query = weight("embed -> heads head_width", (D, H, K))
        self.key = weight("embed -> head_width", (D, K))
        self.value = weight("embed -> head_width", (D, K))
        # σ_U = σ_W and σ_B = 0.1/sqrt(R) make ‖U Bᵀ‖ about 0.1 ‖W_shared‖ for every shape, of keys
        # and of values: E‖U Bᵀ‖² = D K R σ_U² σ_B² and E‖W‖² = D K σ_W².
        std = min(1.0, (K / D) ** 0.5) * D**-0.5
        if self.rank:
            G = config.attention.key_heads(config)
            heads = "heads" if G == H else "kv_heads"
            down, up = f"{heads}: embed -> rank", f"{heads}: rank -> head_width"
            self.key_down = weight(down, (G, D, R_k), std=std)
            self.key_up = weight(up, (G, R_k, K), std=0.1 * R_k**-0.5)
            self.value_down = weight(down, (G, D, R_v), std=std)
            self.value_up = weight(up, (G, R_v, K), std=0.1 * R_v**-0.5)

    def queries(self, x_BTD, positions_BT):
        """The rotated query; in modes `shared` and `latent` also the unrotated one."""
        q_BTHK = biased(product(x_BTD, self, "query"), self.query_bias)
        if self._norms_keys:
            q_BTHK = gained(self.normed(q_BTHK), self.query_gain)
        rotated_BTHK = self.rotated(q_BTHK, positions_BT)
        return (rotated_BTHK, q_BTHK) if self._in_latents else (rotated_BTHK,)

    def new_kv(self, x_BTD, positions_BT):
        return self._entries(x_BTD, positions_BT)[0]

    def attend_cached(self, query, cache, positions_BT, angles, pages_BN=None, first_B1=0):
        residual = None
        if self.rank:
            residual = Residual(cache.rk_BSGR, cache.rv_BSGR, self.value_up[...])
            if self.rope == "full":
                residual = residual._replace(
                    up_key_GRK=self._up_of_normed_keys[...], angles_SK=angles
                )
                if self.config.window is not None:
                    residual = residual._replace(q_BTHK=self.turned_back(query[0], first_B1))
            else:
                residual = residual._replace(q_latent_BTHR=self._latent(query[-1], positions_BT))
        return lrkv_decode(
            query[0], cache.k_shared_BSK, cache.v_shared_BSK, residual,
            cache.inverse_norm_BGS, lengths_of(positions_BT - first_B1),
            scale=self.scale, pages_BN=pages_BN, window=self.config.window,
            frequencies_J=self.frequencies, impl=self.config.decode_kernel,
        )  # fmt: skip

    def materialize_kv(self, cache, positions_BT):
        return self._keys(cache, positions_BT), self._values(cache)

    def expand_query(self, query, positions_BT):
        if not self._in_latents:
            return query[0]
        return jnp.concatenate([query[0], self._latent(query[1], positions_BT)], axis=-1)

    def slot_angles(self, slots):
        """[cos, sin] of each slot's position, [S, K], to rotate keys as they are read."""
        if not self.rank or self.rope != "full":
            return None
        return self.table(slots, self.config.head_width)

    def attend_full(self, x_BTD, positions_BT, attend):
        q_BTHW = self.expand_query(self.queries(x_BTD, positions_BT), positions_BT)
        new, k_BTGK = self._entries(x_BTD, positions_BT)
        if self.rank and not self._in_latents:
            k_BTGW = self.norm_and_rope(k_BTGK, positions_BT, self.key_gain)
        else:
            k_BTGW = self._keys(new, positions_BT)
        return attend(q_BTHW, k_BTGW, self._values(new))

    def cache_shapes(self, batch, length, dtype):
        G, K = self.config.attention.key_heads(self.config), self.config.head_width
        shared = jax.ShapeDtypeStruct((batch, length, K), dtype)
        latents = [
            jax.ShapeDtypeStruct((batch, length, G, cached), dtype) if self.rank else None
            for cached in self.config.attention.cached_ranks(self.config)
        ]
        norm = jax.ShapeDtypeStruct((batch, G, length), jnp.float32)
        return LowRankCache(shared, shared, *latents, norm if self._norms_keys else None)

    def head_weights(self):
        query_HDK, output_HKD = by_head(self.query), in_float64(self.output)
        if not self.rank:  # MQA: there are no parts
            shared = (
                np.broadcast_to(in_float64(w), query_HDK.shape) for w in (self.key, self.value)
            )
            return HeadWeights(query_HDK, *shared, output_HKD, gain_K=self.logit_gain())
        share = len(query_HDK) // self.key_up.shape[0]
        key, value = (
            SharedResidual(
                in_float64(getattr(self, name)),
                np.repeat(in_float64(getattr(self, f"{name}_down")), share, axis=0),
                np.repeat(in_float64(getattr(self, f"{name}_up")), share, axis=0),
            )
            for name in ("key", "value")
        )
        return HeadWeights(
            query_HDK, key.total_HDK, value.total_HDK, output_HKD,
            key_parts=key, value_parts=value, gain_K=self.logit_gain(),
        )  # fmt: skip

    @property
    def _norms_keys(self) -> bool:
        return self.config.attention.norms_keys(self.config)

    @property
    def _in_latents(self) -> bool:
        """Whether training's logits are products of queries and keys' latents in R coordinates."""
        return bool(self.rank) and not self.config.attention.has_whole_keys

    @property
    def _up_of_keys(self):
        """B^K; keys' biases are its last row, and latents have a 1 for it: [G, R + 1, K]."""
        if self.key_bias is None:
            return self.key_up
        return jnp.concatenate([self.key_up[...], self.key_bias[...][:, None]], axis=1)

    @property
    def _up_of_normed_keys(self):
        """B^K behind the norm, with the gain of keys."""
        return gained(self._up_of_keys[...], self.key_gain)

    def _latent(self, q_BTHK, positions_BT):
        """q B_h: the query in the latent's R coordinates, rotated there in mode `latent`."""
        up_HRK = self._of_heads(self._up_of_normed_keys[...], q_BTHK.shape[2]).astype(q_BTHK.dtype)
        q_BTHR = jnp.einsum("BTHK,HRK->BTHR", q_BTHK, up_HRK)
        return self.rotated(q_BTHR, positions_BT) if self.rope == "latent" else q_BTHR

    def _of_heads(self, up_GRK, H):
        """The factors of this device's H query heads, from those of the residuals that it has."""
        groups = self.config.attention.key_heads(self.config)
        share = self.config.heads // groups
        if share == 1:
            return up_GRK
        # In a training step residuals that `tensor` does not divide are whole on each shard.
        every_group = manual_sharding.in_train_step() and len(up_GRK) == groups
        first = manual_sharding.index(TENSOR) * H if every_group else 0
        return up_GRK[(first + jnp.arange(H)) // share]

    def _keys(self, cache, positions_BT):
        """Each residual's keys, rotated and normed.

        In `full` and `none` and at rank 0 they are K wide. In the other modes this is one attention
        of width K + R: [shared, rotated ; residual, as a latent].
        """
        k_BSGK, rk_BSGR = cache.k_shared_BSK[:, :, None], cache.rk_BSGR
        parts = [k_BSGK]
        if self._in_latents:
            rk_BSGR = rk_BSGR[..., : self.key_up.shape[1]]
            parts = [jnp.broadcast_to(parts[0], (*rk_BSGR.shape[:3], k_BSGK.shape[-1])), rk_BSGR]
        elif self.rank:
            residual_BSGK = self._raise(rk_BSGR, self._up_of_normed_keys)
            parts = [parts[0] + self.rotated(residual_BSGK, positions_BT)]
        if cache.inverse_norm_BGS is not None:
            norm_BSG1 = cache.inverse_norm_BGS.swapaxes(1, 2)[..., None]
            parts = [(part * norm_BSG1).astype(k_BSGK.dtype) for part in parts]
        return jnp.concatenate(parts, axis=-1)

    def _values(self, cache):
        """Each residual's values, [B, S, G, K]."""
        v_BS1K = cache.v_shared_BSK[:, :, None]
        return v_BS1K + self._raise(cache.rv_BSGR, self.value_up) if self.rank else v_BS1K

    def _raise(self, latent_BTGR, up):
        """Latent, padded or not → head width: the residual part of a key or value."""
        up_GRK = up[...].astype(latent_BTGR.dtype)
        latent_BTGR = latent_BTGR[..., : up_GRK.shape[1]]
        return jnp.einsum("BTGR,GRK->BTGK", latent_BTGR, up_GRK)

    def _jointly_normed(self, rk_BTGR, rv_BTGR, v_shared_BTK):
        """Latents and shared value over one root mean square, that of all heads' and the value."""
        latents = rk_BTGR, rv_BTGR, v_shared_BTK[:, :, None]
        rk_BT11, rv_BT11, v_BT11 = (
            jnp.square(x.astype(jnp.float32)).sum((2, 3), keepdims=True) for x in latents
        )
        heads_BT11, entry = rk_BT11 + rv_BT11, self.config.attention
        if len(self.key_up[...]) < entry.key_heads(self.config):  # other devices have the others
            heads_BT11 = jax.lax.psum(heads_BT11, heads_axes(self))
        width = entry.cache_values(self.config) - self.config.head_width
        means_BT11 = (heads_BT11 + v_BT11) / width
        inverse_BT11 = jax.lax.rsqrt(means_BT11 + self.config.norm_eps)
        rk_BTGR, rv_BTGR, v_BT1K = ((x * inverse_BT11).astype(x.dtype) for x in latents)
        return rk_BTGR, rv_BTGR, v_BT1K[:, :, 0]

    def _inverse_norms(self, k_shared_BTK, rk_BTGR):
        """1 / rms of keys that are not made, [B, T, G]: |k + r B|² = |k|² + r · (2 k Bᵀ + r B Bᵀ).

        No array is as wide as the keys of all heads, nor is any gradient. In float32 throughout.
        """
        f32 = {"preferred_element_type": jnp.float32}
        up_GRK = self._up_of_keys[...].astype(rk_BTGR.dtype)
        gram_GRR = jnp.einsum("GRK,GSK->GRS", up_GRK, up_GRK, **f32)
        K = k_shared_BTK.shape[-1]
        # One product of two matrices, whose gradients are ones too.
        cross_NF = jnp.matmul(k_shared_BTK.reshape(-1, K), up_GRK.reshape(-1, K).T, **f32)
        cross_BTGR, rk_BTGR = cross_NF.reshape(rk_BTGR.shape), rk_BTGR.astype(jnp.float32)
        own_BTGR = jnp.einsum("BTGR,GRS->BTGS", rk_BTGR, gram_GRR)
        squares_BTG = (rk_BTGR * (2 * cross_BTGR + own_BTGR)).sum(axis=-1)
        squares_BTG += jnp.square(k_shared_BTK.astype(jnp.float32)).sum(axis=-1, keepdims=True)
        return jax.lax.rsqrt(jnp.maximum(squares_BTG, 0) / K + self.config.norm_eps)

    def _entries(self, x_BTD, positions_BT):
        """Cache entries of each token, and its whole unrotated keys where logits meet those.

        The keys, [B, T, G, K], are never cached. At rank 0 all heads have one key, and G is 1.
        """
        k_shared_BTK, v_shared_BTK = product(x_BTD, self, "key"), product(x_BTD, self, "value")
        rk_BTGR = rv_BTGR = norm_BGT = k_BTGK = None
        if self.rank:
            rk_BTGR = product(x_BTD, self, "key_down")
            rv_BTGR = product(x_BTD, self, "value_down")
        if self.key_bias is not None:
            if self.rank:
                rk_BTGR = with_one(rk_BTGR)
            else:
                k_shared_BTK = biased(k_shared_BTK, self.key_bias)
        if not self._in_latents:
            k_BTGK = k_shared_BTK[:, :, None]
            if self.rank:
                k_BTGK = k_BTGK + self._raise(rk_BTGR, self._up_of_keys)
        if self._norms_keys:
            norm_BGT = (
                self._inverse_norms(k_shared_BTK, rk_BTGR)
                if self._in_latents
                else inverse_rms(k_BTGK, self.config.norm_eps)
            ).swapaxes(1, 2)
        if self.config.attention.latent_norm == "joint":
            rk_BTGR, rv_BTGR, v_shared_BTK = self._jointly_normed(rk_BTGR, rv_BTGR, v_shared_BTK)
        k_shared_BTK = gained(k_shared_BTK, self.key_gain)
        k_shared_BTK = self.rotated(k_shared_BTK[:, :, None], positions_BT)[:, :, 0]
        if self.rank and self.rope == "latent":
            rk_BTGR = self.rotated(rk_BTGR, positions_BT)
        return LowRankCache(k_shared_BTK, v_shared_BTK, rk_BTGR, rv_BTGR, norm_BGT), k_BTGK
