"""MHA, GQA and MQA as configuration: settings, checks and closed-form counts per layer.

D model width  H heads  G key/value heads  K head width
"""

from __future__ import annotations

from typing import ClassVar, Literal

from lrkv_jax.config.attention import AttentionConfig, ModelShape, check_groups
from lrkv_jax.config.frozen import Positive, semantics


class _Grouped(AttentionConfig):
    layer: ClassVar[str] = "lrkv_jax.models.attention.grouped:GroupedAttention"
    rotates_full_keys: ClassVar = True
    rope: Literal["full", "none"] = semantics(
        "full: keys and queries are rotated; none: they are not, as in a hybrid's global layers.",
        "full",
    )

    def kv_parameters(self, model: ModelShape) -> int:
        return 2 * model.width * self.key_heads(model) * model.head_width

    def cache_values(self, model: ModelShape) -> int:
        return 2 * self.key_heads(model) * model.head_width

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        return ((2 * self.key_heads(model), model.head_width),)

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        return 4 * model.heads * model.head_width


class MHA(_Grouped):
    """Multi-head attention: each head has separate keys and values."""

    name: ClassVar[str] = "mha"
    styles: ClassVar = {"full": ("#000000", "-", "o")}


class GQA(_Grouped):
    """Grouped-query attention: `kv_heads` key/value heads, each serving H / kv_heads queries."""

    name: ClassVar[str] = "gqa"
    styles: ClassVar = {"full": ("#56B4E9", "--", "s")}
    kv_heads: Positive = semantics("Key/value heads, G. They divide the model's heads.")

    def check(self, model: ModelShape) -> None:
        check_groups(self.kv_heads, model)

    @property
    def size(self) -> int:
        return self.kv_heads

    def key_heads(self, model: ModelShape) -> int:
        return self.kv_heads


class MQA(_Grouped):
    """Multi-query attention: one key and value head for all queries."""

    name: ClassVar[str] = "mqa"
    styles: ClassVar = {"full": ("#0072B2", ":", "v")}

    def key_heads(self, model: ModelShape) -> int:
        return 1
