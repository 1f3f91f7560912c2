"""Controls of the family: what LRKV in mode `latent` might owe to something other than its latents.

Each differs from a line of the package in one thing, and joins from outside it
(`docs/new_variant.md`): `PYTHONPATH=experiments lrkv sweep experiments/controls.yaml ...`.

K head width  R residual rank
"""

from typing import ClassVar

import jax

from lrkv_jax.config.frozen import Positive, semantics
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import LRKV, MHA
from lrkv_jax.models.attention.cache import attend_tiles, lengths_of
from lrkv_jax.models.attention.grouped import GroupedAttention, GroupedCache
from lrkv_jax.models.attention.lrkv import LowRankAttention
from lrkv_jax.models.weights import weight


class WideMHA(MHA):
    """MHA whose logits are products of K + R coordinates, as LRKV's in mode `latent`.

    Queries and keys are wider than heads; values are not.
    """

    name: ClassVar[str] = "wide_mha"
    layer: ClassVar[str] = "WideAttention"
    styles: ClassVar = {"full": ("#000000", ":", "o")}
    more: Positive = semantics("Coordinates of queries and keys beyond the head width.")

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


class WideAttention(GroupedAttention):
    """MHA with wider queries and keys; decoded a tile of slots at a time, by XLA."""

    def __init__(self, config):
        super().__init__(config)
        shape = config.width, config.heads, config.attention.query_width(config)
        self.query, self.key = (weight("embed -> heads head_width", shape) for _ in range(2))

    def attend_cached(self, query, cache, positions_BT, angles, pages_BN=None):
        lengths_B, how = lengths_of(positions_BT), {"scale": self.scale, "pages_BN": pages_BN}
        return attend_tiles(query, cache, self.materialize_kv, lengths_B, **how), None

    def cache_shapes(self, batch, length, dtype):
        H, K = self.config.heads, self.config.head_width
        widths = self.config.attention.query_width(self.config), K
        return GroupedCache(*(jax.ShapeDtypeStruct((batch, length, H, n), dtype) for n in widths))


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

    def angles_at(self, positions, width):
        cos, sin = super().angles_at(positions, self.config.head_width)
        return cos[..., : width // 2], sin[..., : width // 2]
