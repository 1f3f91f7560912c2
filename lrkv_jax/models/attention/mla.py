"""MLA: one latent per token, expanded into each head's keys and values.

B batch  T new tokens  S cache slots  D model width  H heads  G groups of them  K head width
C latent width  R width of a head's private latent  P rope-key width  W logit width

c = norm(x W_down), C wide; v_h = c W^V_h. Positions enter in one of two modes, each decoded
exactly as it is trained (`lrkv_jax.kernels.latent_decode` has the equations):

    decoupled  k_h = [c W^K_h ; norm(rope(x W_r))], one rope key next to the latent. A head's query
               is [K without rope ; P with rope], each part normed. The expanded keys carry no norm:
               q · (c W^K_h) = (q W^K_hᵀ) · c needs them linear in c. DeepSeek's.
    full       k_h = norm(rope(c W^K_h)), the query normed and rotated as MHA's. Cached are c and
               n_h = 1/rms(c W^K_h), a float32 scalar per token and head. Where c is read, gains
               of keys are in W^K_h, and so are their biases: c has one column more, which is 1.

With `rank`, head h has a private latent, r_h = norm(x U_h), R wide, next to the common one: read
c W above as c W + r_h B_h, for keys and for values.

G is H but in `full`, where keys, values and latents r may be of groups (`kv_heads`), and where the
norms of latents may be left out (`latent_norm`).

Logits are scaled by 1/sqrt(W), of the width in which queries and keys are normed: K + P and K.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lrkv_jax.config import ModelConfig
from lrkv_jax.kernels.latent_decode import Private, Rotation, latent_decode
from lrkv_jax.models.attention.base import Attention
from lrkv_jax.models.attention.cache import lengths_of, with_one
from lrkv_jax.models.attention.head_weights import HeadWeights, by_head, in_float64
from lrkv_jax.models.layers import biased, gained, inverse_rms, rms_norm
from lrkv_jax.models.weights import product, weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """The latent, unrotated, which all heads share, and those of single heads or groups.

    In mode `decoupled` also the rope key, rotated and normed, which they share too; in `full`
    float32 1/rms of each group's key, unless the model has no QK-norm. Latents of groups are
    zero-padded to the entry's `cached_rank`; without a rank there are none.
    """

    AXES: ClassVar[dict[str, str]] = {
        "latent_BSC": "batch slots latent",
        "rope_key_BSP": "batch slots rope",
        "inverse_norm_BGS": "batch kv_heads slots",
        "private_BSGR": "batch slots kv_heads rank",
    }
    INT8: ClassVar[tuple[str, ...]] = ("latent_BSC", "private_BSGR")

    latent_BSC: Float[Array, "B S C"]
    rope_key_BSP: Float[Array, "B S P"] | None = None
    inverse_norm_BGS: Float[Array, "B G S"] | None = None
    private_BSGR: Float[Array, "B S G R"] | None = None


class LatentAttention(Attention):
    """Multi-head latent attention; decoding is absorbed: queries move into the latent."""

    joins = ("query", "query_rope", "down", "private_down", "rope_key")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        C, P = config.attention.kv_lora_rank, config.attention.qk_rope_head_dim
        self.rope, self.rank = config.attention.rope, config.attention.rank
        self.query = weight("embed -> heads head_width", (D, H, K))
        self.down = weight("embed -> latent", (D, C))
        G = config.attention.key_heads(config)
        heads = "heads" if G == H else "kv_heads"
        self.up_key = weight(f"latent -> {heads} head_width", (C, G, K))
        self.up_value = weight(f"latent -> {heads} head_width", (C, G, K))
        if R := self.rank:
            self.private_down = weight(f"{heads}: embed -> rank", (G, D, R))
            # A normed latent: a head's private part is a tenth of its keys, and of its values.
            for name in ("private_key", "private_value"):
                setattr(
                    self, name, weight(f"{heads}: rank -> head_width", (G, R, K), std=0.1 * R**-0.5)
                )
        # Without a rope key there is nothing to learn here.
        self.query_rope = weight("embed -> heads rope", (D, H, P)) if P else None
        self.rope_key = weight("embed -> rope", (D, P)) if P else None

    def queries(self, x_BTD, positions_BT):
        """[B, T, H, K], rotated and normed.

        In `decoupled` a pair: the part without positions, and the part with them, [B, T, H, P].
        """
        q_BTHK = biased(product(x_BTD, self, "query"), self.query_bias)
        if self.rope == "full":
            return self.norm_and_rope(q_BTHK, positions_BT, self.query_gain)
        if self.query_rope is None:
            return self.normed(q_BTHK), q_BTHK[..., :0]
        q_BTHP = product(x_BTD, self, "query_rope")
        return self.normed(q_BTHK), self.normed(self.rotated(q_BTHP, positions_BT))

    def new_kv(self, x_BTD, positions_BT):
        latent_BTC = self._latent_normed(product(x_BTD, self, "down"))
        private_BTGR = rope_key_BTP = norm_BGT = None
        if self.rank:
            private_BTGR = self._latent_normed(product(x_BTD, self, "private_down"))
        if self.key_bias is not None:
            latent_BTC = with_one(latent_BTC)
        if self.rope == "full" and self.config.qk_norm:
            k_BTGK = self._raised(latent_BTC, private_BTGR, "key")
            norm_BGT = inverse_rms(k_BTGK, self.config.norm_eps).swapaxes(1, 2)
        if self.rope == "decoupled":
            rope_key_BTP = latent_BTC[..., :0]
            if self.rope_key is not None:
                rope_key_BT1P = product(x_BTD, self, "rope_key")[:, :, None]
                rope_key_BTP = self.normed(self.rotated(rope_key_BT1P, positions_BT))[:, :, 0]
        return LatentCache(latent_BTC, rope_key_BTP, norm_BGT, private_BTGR)

    def attend_cached(self, query, cache, positions_BT, angles, pages_BN=None, first_B1=0):
        q_BTHP = q_BTHR = up_key_GRK = rotation = private = None
        C = cache.latent_BSC.shape[-1]
        if self.rope == "full":
            up_key_CGK = gained(self._up_of("key"), self.key_gain)
            rotation = Rotation(angles, up_key_CGK, cache.inverse_norm_BGS)
            query = self.turned_back(query, first_B1)
            if self.rank:
                up_key_GRK = gained(self.private_key[...], self.key_gain)
        else:
            # Queries move into the latents: q W^K_hᵀ, and q B^K_hᵀ.
            q_BTHK, q_BTHP = query
            up_key_CHK = self.up_key[...].astype(q_BTHK.dtype)
            query = jnp.einsum("BTHK,CHK->BTHC", q_BTHK, up_key_CHK)
            if self.rank:
                up_HRK = self.private_key[...].astype(q_BTHK.dtype)
                q_BTHR = jnp.einsum("BTHK,HRK->BTHR", q_BTHK, up_HRK)
        if self.rank:
            private = Private(cache.private_BSGR, q_BTHR, up_key_GRK)
        mean_BTHX, lse_BTH = latent_decode(
            query, q_BTHP, cache.latent_BSC, cache.rope_key_BSP, rotation, private,
            lengths_of(positions_BT - first_B1), scale=self.scale, pages_BN=pages_BN,
            window=self.config.window, frequencies_J=self.frequencies,
            impl=self.config.decode_kernel,
        )  # fmt: skip
        mean_BTHX = mean_BTHX.astype(query.dtype)
        own_BTHR = mean_BTHX[..., C:] if self.rank else None
        return self._raised(mean_BTHX[..., :C], own_BTHR, "value", of_heads=True), lse_BTH

    def materialize_kv(self, cache, positions_BT):
        latents = cache.latent_BSC, cache.private_BSGR
        k_BSGK, v_BSGK = (self._raised(*latents, name) for name in ("key", "value"))
        if self.rope == "full":
            k_BSGK = self.rotated(gained(k_BSGK, self.key_gain), positions_BT)
            if cache.inverse_norm_BGS is not None:
                norm_BSG1 = cache.inverse_norm_BGS.swapaxes(1, 2)[..., None]
                k_BSGK = (k_BSGK * norm_BSG1).astype(v_BSGK.dtype)
            return k_BSGK, v_BSGK
        rope_BS1P = cache.rope_key_BSP[:, :, None]
        rope_BSGP = jnp.broadcast_to(rope_BS1P, (*k_BSGK.shape[:3], rope_BS1P.shape[-1]))
        return jnp.concatenate([k_BSGK, rope_BSGP], axis=-1), v_BSGK

    def expand_query(self, query, positions_BT):
        if self.rope == "decoupled":
            return jnp.concatenate(query, axis=-1)
        return query

    def slot_angles(self, slots):
        """[cos, sin] of each slot's position, [S, K], to rotate keys as they are read, or None."""
        return self.table(slots, self.config.head_width) if self.rope == "full" else None

    def attend_full(self, x_BTD, positions_BT, attend):
        if self.rope != "full":
            return super().attend_full(x_BTD, positions_BT, attend)
        new = self.new_kv(x_BTD, positions_BT)
        latents = new.latent_BSC, new.private_BSGR
        k_BTGK, v_BTGK = (self._raised(*latents, name) for name in ("key", "value"))
        k_BTGK = self.norm_and_rope(k_BTGK, positions_BT, self.key_gain)
        return attend(self.queries(x_BTD, positions_BT), k_BTGK, v_BTGK)

    def cache_shapes(self, batch, length, dtype):
        entry = self.config.attention
        latent, rope_key = (
            jax.ShapeDtypeStruct((batch, length, n), dtype)
            for n in (entry.cached_latent(self.config), entry.qk_rope_head_dim)
        )
        private, norm, G = None, None, entry.key_heads(self.config)
        if self.rank:
            private = jax.ShapeDtypeStruct((batch, length, G, entry.cached_rank), dtype)
        if self.rope == "full" and self.config.qk_norm:
            norm = jax.ShapeDtypeStruct((batch, G, length), jnp.float32)
        return LatentCache(latent, rope_key if self.rope == "decoupled" else None, norm, private)

    def head_weights(self):
        down_DC, positions = in_float64(self.down), {}
        families = [down_DC @ by_head(up) for up in (self.up_key, self.up_value)]
        if self.rank:
            own_GDR = in_float64(self.private_down)
            owns = (in_float64(up) for up in (self.private_key, self.private_value))
            families = [f + own_GDR @ own for f, own in zip(families, owns, strict=True)]
        share = self.config.heads // len(families[0])
        key_HDK, value_HDK = (np.repeat(family, share, axis=0) for family in families)
        if self.rope_key is not None:
            positions["query_rope_HDP"] = by_head(self.query_rope)
            positions["rope_key_DP"] = in_float64(self.rope_key)
        return HeadWeights(
            by_head(self.query), key_HDK, value_HDK, in_float64(self.output), **positions,
            gain_K=self.logit_gain(),
        )  # fmt: skip

    def _latent_normed(self, latent):
        """A latent over its root mean square, unless the entry leaves latents as they are."""
        if not self.config.attention.latent_norm:
            return latent
        return rms_norm(latent, self.config.norm_eps)

    def _raised(self, latent, private, name, *, of_heads=False):
        """Each group's keys before rotation and norm, or its values, from latents.

        Or each head's mean value from its mean latents, [B, T, H, C].
        """
        up_CGK = self._up_of(name).astype(latent.dtype)
        if latent.shape[-1] > len(up_CGK):  # values have no bias
            latent = latent[..., : len(up_CGK)]
        # Each head has a mean latent, which the factors of the head's group multiply.
        share = latent.shape[2] // up_CGK.shape[1] if of_heads else 1
        up_CGK = jnp.repeat(up_CGK, share, axis=1)
        raised_BTGK = jnp.einsum(f"{'BTGC' if of_heads else 'BTC'},CGK->BTGK", latent, up_CGK)
        if private is None:
            return raised_BTGK
        own_GRK = getattr(self, f"private_{name}")[...].astype(latent.dtype)
        own_GRK = jnp.repeat(own_GRK, share, axis=0)
        return raised_BTGK + jnp.einsum("BTGR,GRK->BTGK", private[..., : self.rank], own_GRK)

    def _up_of(self, name):
        """The factor [C, G, K] of keys or values; biases of keys are a row of theirs."""
        up_CGK = getattr(self, f"up_{name}")[...]
        if name == "value" or self.key_bias is None:
            return up_CGK
        return jnp.concatenate([up_CGK, self.key_bias[...][None]])
