"""MLA as configuration: settings, checks and closed-form counts per layer.

D model width  H heads  G groups of them  K head width  C latent width  R width of a head's private
latent  P rope-key width
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from lrkv_jax.config.attention import (
    AttentionConfig,
    ModelShape,
    check_groups,
    check_rank,
    joined_words,
    padded_rank,
)
from lrkv_jax.config.frozen import NonNegative, Positive, semantics
from lrkv_jax.errors import LrkvError


class MLA(AttentionConfig):
    """Multi-head latent attention: one latent per token, expanded into each head's keys and values.

    `rope`: `decoupled` puts positions into a separate rope key (DeepSeek's). There,
    `qk_rope_head_dim = 0` reproduces the paper's cache count, and drops positions altogether.
    `full` rotates each head's whole key, and has no rope key. With `rank` each head has a private
    latent next to the common one. In `full`, keys, values and private latents may be of G groups
    of heads (`kv_heads`).
    """

    name: ClassVar[str] = "mla"
    layer: ClassVar[str] = "lrkv_jax.models.attention.mla:LatentAttention"
    styles: ClassVar = {
        "decoupled": ("#CC79A7", "-.", "D"),
        "full": ("#882255", "-", "d"),
    }
    kv_lora_rank: Positive = semantics("Width of the latent that all heads share, C.")
    qk_rope_head_dim: NonNegative = semantics(
        "Width of the rope key that all heads share, P. Even; 0 drops positions. In the mode full "
        "there is none: 0.",
        64,
    )
    rope: Literal["decoupled", "full"] = semantics(
        "What positions rotate. decoupled: a separate rope key; full: each head's whole key.",
        "decoupled",
    )
    rank: NonNegative = semantics(
        "Width of each head's private latent, next to the common one, R.", 0
    )
    kv_heads: Positive | None = semantics(
        "Number of keys and values that latents are expanded into, G: each serves a group of "
        "heads / G query heads. Null: one for each head. In mode full alone.",
        None,
    )
    latent_norm: bool = semantics(
        "Whether latents are divided by their root mean square. false, in mode full alone, leaves "
        "keys and values linear in the layer's input, as a converted model's are.",
        True,
    )

    @model_validator(mode="before")
    @classmethod
    def _no_rope_key(cls, settings: Any) -> Any:
        """Only `decoupled` has a rope key: what `full` leaves out is 0."""
        if isinstance(settings, dict) and settings.get("rope") == "full":
            return {"qk_rope_head_dim": 0, **settings}
        return settings

    @classmethod
    def overridden(cls, settings: dict[str, Any], changed: set[str]) -> dict[str, Any]:
        """A file's rope width is of its mode, and is dropped with another mode."""
        moved = "rope" in changed and settings.get("rope") == "full"
        if moved and "qk_rope_head_dim" not in changed:
            return {key: value for key, value in settings.items() if key != "qk_rope_head_dim"}
        return settings

    @property
    def size(self) -> int:
        return self.kv_lora_rank

    @property
    def form(self) -> str:
        groups = "" if self.kv_heads is None else f"in {self.kv_heads} groups"
        rank = f"rank {self.rank}" if self.rank else ""
        return joined_words(
            super().form, rank, groups, "" if self.latent_norm else "no latent norm"
        )

    def key_heads(self, model: ModelShape) -> int:
        """G, the keys and values of a layer."""
        return self.kv_heads or model.heads

    @property
    def rotates_full_keys(self) -> bool:
        return self.rope == "full"

    @property
    def cached_rank(self) -> int:
        """Columns of a head's private cached latents."""
        return padded_rank(self.rank)

    def check(self, model: ModelShape) -> None:
        check_rank("rank", self.rank, model, "no latents of single heads", "spans MHA")
        if self.qk_rope_head_dim % 2:
            raise LrkvError(
                f"attention.qk_rope_head_dim = {self.qk_rope_head_dim} is odd, and rotation works "
                f"on pairs: use {self.qk_rope_head_dim - 1} or {self.qk_rope_head_dim + 1}"
            )
        if self.qk_rope_head_dim and self.rope != "decoupled":
            raise LrkvError(
                f"attention.qk_rope_head_dim = {self.qk_rope_head_dim}, and rope: {self.rope} has "
                "no rope key: leave qk_rope_head_dim out, or use rope: decoupled"
            )
        if self.rope != "full" and (self.kv_heads or not self.latent_norm):
            name = "kv_heads" if self.kv_heads else "latent_norm"
            raise LrkvError(f"attention.{name} is of rope: full: leave it out, or use rope: full")
        if self.kv_heads is not None:
            check_groups(self.kv_heads, model)

    def query_width(self, model: ModelShape) -> int:
        return model.head_width + self.qk_rope_head_dim

    def kv_parameters(self, model: ModelShape) -> int:
        down = self.kv_lora_rank + self.qk_rope_head_dim + self.key_heads(model) * self.rank
        up = 2 * (self.kv_lora_rank + self.rank) * self.key_heads(model) * model.head_width
        return model.width * down + up

    def cached_latent(self, model: ModelShape) -> int:
        """Columns of the cached common latent; with biases of keys one more, a 1 for them."""
        return self.kv_lora_rank + model.qkv_bias

    def cache_values(self, model: ModelShape) -> int:
        return self.cached_latent(model) + self.qk_rope_head_dim + self.key_heads(model) * self.rank

    def cache_values_published(self, model: ModelShape) -> int:
        return self.cache_values(model) - self.qk_rope_head_dim

    def cache_padding_values(self, model: ModelShape) -> int:
        return self.key_heads(model) * (self.cached_rank - self.rank)

    def cache_scalars(self, model: ModelShape) -> int:
        return self.key_heads(model) if self.rope == "full" and model.qk_norm else 0

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        private = ((self.key_heads(model), self.rank),) if self.rank else ()
        return ((1, self.cached_latent(model)), *private)

    def decode_flops(self, model: ModelShape) -> int:
        """q W_up, and (a c) W_up; `full` makes M_h(q) instead of q W_up, three FLOPs an entry."""
        each = 3 if self.rope == "full" else 2
        return (2 + each) * model.heads * (self.cached_latent(model) + self.rank) * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """`full` reads latents through [cos, sin] · M_h(q), K · (C + R) more products per head."""
        width = self.cached_latent(model) + self.rank
        exact = 2 * model.head_width * width if self.rope == "full" else 0
        return model.heads * (4 * width + 2 * self.qk_rope_head_dim + exact)
