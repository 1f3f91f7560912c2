"""Controls of the family: what LRKV in mode `latent` might owe to something other than its latents.

Each differs from a line of the package in one thing, and joins from outside it
(`docs/new_variant.md`): `PYTHONPATH=experiments lrkv sweep experiments/controls.yaml ...`.

B batch  T new tokens  S cache slots  D model width  H heads  K head width  W width of a logit
R residual rank
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lrkv_jax.attention import Attention
from lrkv_jax.attention.cache import lengths_of
from lrkv_jax.attention.head_weights import HeadWeights, by_head, in_float64
from lrkv_jax.attention.lrkv import LowRankAttention
from lrkv_jax.attention.tiles import attend_tiles
from lrkv_jax.config import LRKV, AttentionConfig
from lrkv_jax.config.frozen import Positive, result
from lrkv_jax.errors import LrkvError
from lrkv_jax.nn.rope import rope_angles, rotate
from lrkv_jax.nn.weight import weight


class WideMHA(AttentionConfig):
    """MHA whose logits are products of K + R coordinates, as LRKV's in mode `latent`.

    Queries and keys are wider than heads; values are not.
    """

    name: ClassVar[str] = "wide_mha"
    layer: ClassVar[str] = "WideAttention"
    looks: ClassVar = {None: ("#000000", ":", "o")}
    more: Positive = result("Coordinates of queries and keys beyond the head width.")

    @property
    def size(self):
        return self.more

    def query_width(self, model):
        return model.head_width + self.more

    def kv_parameters(self, model):
        return model.width * self.cache_values(model)

    def cache_values(self, model):
        return model.heads * (self.query_width(model) + model.head_width)

    def decode_flops_per_cached_token(self, model):
        return 2 * self.cache_values(model)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WideCache:
    """Keys, rotated and normed, and values of each head."""

    AXES: ClassVar[dict[str, str]] = {
        "k_BSHW": "batch slots heads key_width",
        "v_BSHK": "batch slots heads head_width",
    }

    k_BSHW: Float[Array, "B S H W"]
    v_BSHK: Float[Array, "B S H K"]


class WideAttention(Attention):
    """MHA with wider queries and keys; decoded a tile of slots at a time, by XLA."""

    def __init__(self, config):
        super().__init__(config)
        D, H, K = config.width, config.heads, config.head_width
        W = config.attention.query_width(config)
        self.query = weight("embed -> heads head_width", (D, H, W))
        self.key = weight("embed -> heads head_width", (D, H, W))
        self.value = weight("embed -> heads head_width", (D, H, K))

    @property
    def scale(self):
        """1 / sqrt(K + R): queries and keys are normed over all of their coordinates."""
        return self.config.attention.query_width(self.config) ** -0.5

    def queries(self, x_BTD, positions_BT):
        return self._placed(x_BTD, self.query, positions_BT)

    def entries(self, x_BTD, positions_BT):
        v_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, self.value[...].astype(x_BTD.dtype))
        return WideCache(self._placed(x_BTD, self.key, positions_BT), v_BTHK)

    def cached(self, query, cache, positions_BT, angles):
        lengths_B = lengths_of(positions_BT)
        return attend_tiles(query, cache, self.materialised, lengths_B, scale=self.scale), None

    def materialised(self, cache, positions_BT):
        return cache.k_BSHW, cache.v_BSHK

    def cache_shapes(self, batch, length, dtype):
        H, K = self.config.heads, self.config.head_width
        widths = self.config.attention.query_width(self.config), K
        return WideCache(*(jax.ShapeDtypeStruct((batch, length, H, n), dtype) for n in widths))

    def head_weights(self):
        return HeadWeights(
            *map(by_head, (self.query, self.key, self.value)), in_float64(self.output)
        )

    def _placed(self, x_BTD, weights, positions_BT):
        x_BTHW = jnp.einsum("BTD,DHW->BTHW", x_BTD, weights[...].astype(x_BTD.dtype))
        return self.normed(self.rotated(x_BTHW, positions_BT))


class OneTable(LRKV):
    """LRKV in mode `latent` whose latents turn at the head's R / 2 highest frequencies.

    The package's latents have a table of their own: R / 2 frequencies, spread as widely as K / 2.
    """

    name: ClassVar[str] = "lrkv_one_table"
    layer: ClassVar[str] = "OneTableAttention"

    def check(self, model):
        super().check(model)
        if self.rope != "latent":
            raise LrkvError(f"attention.rope = {self.rope}: latents turn in rope: latent alone")


class OneTableAttention(LowRankAttention):
    """LRKV with one table of frequencies for shared keys and latents."""

    def rotated(self, x_BTHK, positions_BT):
        K, width = self.config.head_width, x_BTHK.shape[-1]
        cos_BTJ, sin_BTJ = rope_angles(positions_BT, K, self.config.rope_base)
        cos_BT1J, sin_BT1J = (table[:, :, None, : width // 2] for table in (cos_BTJ, sin_BTJ))
        return rotate(x_BTHK, cos_BT1J, sin_BT1J)
