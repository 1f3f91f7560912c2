"""MHA, GQA and MQA: H query heads over G key/value heads (G = H, between, 1).

B batch  T new tokens  S cache slots  D model width  H heads  G key/value heads  K head width

Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), Shazeer 2019
(https://arxiv.org/abs/1911.02150), Ainslie et al. 2023 (https://arxiv.org/abs/2305.13245).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Array, Float

from lrkv_jax.config import ModelConfig
from lrkv_jax.kernels.grouped_decode import grouped_decode
from lrkv_jax.models.attention.base import Attention
from lrkv_jax.models.attention.cache import lengths_of
from lrkv_jax.models.attention.head_weights import HeadWeights, by_head, in_float64
from lrkv_jax.models.layers import biased
from lrkv_jax.models.weights import product, weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedCache:
    """Keys, rotated and normed, and values of each key/value head."""

    AXES: ClassVar[dict[str, str]] = {
        "k_BSGK": "batch slots kv_heads head_width",
        "v_BSGK": "batch slots kv_heads head_width",
    }
    INT8: ClassVar[tuple[str, ...]] = ("k_BSGK", "v_BSGK")

    k_BSGK: Float[Array, "B S G K"]
    v_BSGK: Float[Array, "B S G K"]


class GroupedAttention(Attention):
    """Each of G key and value heads serves H / G query heads."""

    joins = ("query", "key", "value")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        self.groups = config.attention.key_heads(config)
        self.query = weight("embed -> heads head_width", (D, H, K))
        self.key = weight("embed -> kv_heads head_width", (D, self.groups, K))
        self.value = weight("embed -> kv_heads head_width", (D, self.groups, K))

    def queries(self, x_BTD, positions_BT):
        q_BTHK = biased(product(x_BTD, self, "query"), self.query_bias)
        return self.norm_and_rope(q_BTHK, positions_BT, self.query_gain)

    def new_kv(self, x_BTD, positions_BT):
        k_BTGK = biased(product(x_BTD, self, "key"), self.key_bias)
        v_BTGK = product(x_BTD, self, "value")
        return GroupedCache(self.norm_and_rope(k_BTGK, positions_BT, self.key_gain), v_BTGK)

    def attend_cached(self, query, cache, positions_BT, angles, pages_BN=None, first_B1=0):
        return grouped_decode(
            query, cache.k_BSGK, cache.v_BSGK, lengths_of(positions_BT - first_B1),
            scale=self.scale, pages_BN=pages_BN, window=self.config.window,
            impl=self.config.decode_kernel,
        )  # fmt: skip

    def materialize_kv(self, cache, positions_BT):
        return cache.k_BSGK, cache.v_BSGK

    def cache_shapes(self, batch, length, dtype):
        row = jax.ShapeDtypeStruct((batch, length, self.groups, self.config.head_width), dtype)
        return GroupedCache(row, row)

    def head_weights(self):
        key_HDK, value_HDK = (
            np.repeat(by_head(weight), self.config.heads // self.groups, axis=0)
            for weight in (self.key, self.value)
        )
        return HeadWeights(
            by_head(self.query), key_HDK, value_HDK, in_float64(self.output),
            gain_K=self.logit_gain(),
        )  # fmt: skip
