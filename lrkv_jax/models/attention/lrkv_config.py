"""LRKV as configuration: settings, checks and closed-form counts per layer.

D model width  H heads  G groups of them  K head width  R residual rank
"""

from __future__ import annotations

from typing import ClassVar, Literal

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


class LRKV(AttentionConfig):
    """Low-rank key-value attention: one shared projection and a rank-R residual for each head.

    Keys and values may have separate ranks, R_k and R_v (`rank_key`, `rank_value`). With
    `kv_heads`, G groups of query heads have a residual each.
    `rope`: `full`, the default, rotates the whole key, as the paper trains it; `shared` rotates the
    shared part alone; `latent` rotates the shared part and, in R dimensions, the latent; `none`
    rotates nothing. With `latent_norm: joint`, `shared` is DeepSeek's attention, sparse.
    """

    name: ClassVar[str] = "lrkv"
    layer: ClassVar[str] = "lrkv_jax.models.attention.lrkv:LowRankAttention"
    styles: ClassVar = {
        "full": ("#D55E00", "-", "^"),
        "shared": ("#E69F00", "--", "P"),
        "latent": ("#009E73", "-.", "X"),
    }
    rank: NonNegative = semantics(
        "Rank of each head's residual, R. 0 is MQA; head_width can represent any MHA."
    )
    rope: Literal["full", "shared", "latent", "none"] = semantics(
        "What positions rotate. full: the whole key, as in the paper; shared: its shared part "
        "alone; latent: its shared part, and the latent in its R coordinates; none: nothing.",
        "full",
    )
    rank_key: Positive | None = semantics("Rank of the keys' residuals, R_k. Null is rank.", None)
    rank_value: Positive | None = semantics(
        "Rank of the values' residuals, R_v. Null is rank.", None
    )
    kv_heads: Positive | None = semantics(
        "Number of residuals, G: each serves a group of heads / G query heads. Null: one for each "
        "head.",
        None,
    )
    latent_norm: Literal["none", "joint"] = semantics(
        "joint, in rope: shared alone, divides the latents of all heads and the shared value by "
        "one root mean square, in place of QK-norm.",
        "none",
    )

    @property
    def size(self) -> int:
        return self.rank

    @property
    def rotates_full_keys(self) -> bool:
        return not self.rank or self.has_whole_keys

    @property
    def has_whole_keys(self) -> bool:
        """Whether a logit of training is a query times one key of the head, K wide."""
        return self.rope in ("full", "none")

    def key_heads(self, model: ModelShape) -> int:
        """G, the residuals of a layer; at rank 0 the one key and value that all heads have."""
        return (self.kv_heads or model.heads) if self.rank else 1

    def norms_keys(self, model: ModelShape) -> bool:
        """Whether the layer has QK-norm."""
        return model.qk_norm and self.latent_norm == "none"

    @property
    def ranks(self) -> tuple[int, int]:
        """R_k and R_v."""
        return self.rank_key or self.rank, self.rank_value or self.rank

    @property
    def warning(self) -> str:
        name, rank = "rank" if self.rank_key is None else "rank_key", self.ranks[0]
        if self.rope != "latent" or rank % 2 == 0:
            return ""
        return (
            f"attention.{name} = {rank}: odd, so in rope: latent the last coordinate of each "
            "latent carries no position; an even one has all of them rotated"
        )

    @property
    def sized(self) -> str:
        R_k, R_v = self.ranks
        return str(R_k) if R_k == R_v else f"{R_k}/{R_v}"

    @property
    def form(self) -> str:
        groups = "" if self.kv_heads is None else f"in {self.kv_heads} groups"
        norm = "joint norm" if self.latent_norm == "joint" else ""
        return joined_words(super().form, groups, norm)

    def check(self, model: ModelShape) -> None:
        given = {"rank": self.rank, "rank_key": self.rank_key, "rank_value": self.rank_value}
        for name, rank in given.items():
            check_rank(name, rank, model, "MQA", "spans MHA")
        if not self.rank and (self.rank_key or self.rank_value or self.kv_heads):
            raise LrkvError(
                "attention.rank = 0 is MQA, which has no residuals: leave out rank_key, rank_value "
                "and kv_heads, or give rank 1 or more"
            )
        if self.latent_norm == "joint" and (not self.rank or self.rope != "shared"):
            raise LrkvError(
                "attention.latent_norm = joint is of rope: shared with rank 1 or more: set "
                "attention.rope=shared and a rank, or attention.latent_norm=none"
            )
        if self.kv_heads is not None:
            check_groups(self.kv_heads, model)

    def logit_width(self, model: ModelShape) -> int:
        return model.head_width + (0 if self.has_whole_keys else self.ranks[0])

    def kv_parameters(self, model: ModelShape) -> int:
        down = 2 * model.head_width + self.key_heads(model) * sum(self.ranks)
        return model.width * down + self.key_heads(model) * sum(self.ranks) * model.head_width

    def extra_multiplications(self, model: ModelShape) -> int:
        # B^K takes H queries to the latents, and for the norms the shared key to those of G, which
        # then meet B B^T. One of the G is in `kv_parameters`.
        if self.has_whole_keys:
            return 0
        H, G, R_k, norms = model.heads, self.key_heads(model), self.ranks[0], self.norms_keys(model)
        return (H + G * (norms - 1)) * R_k * model.head_width + norms * G * R_k**2

    def filled_ranks(self, model: ModelShape) -> tuple[int, int]:
        """Columns of cached latents that are not zero: R_k, with keys' biases a 1 more, and R_v."""
        R_k, R_v = self.ranks
        return R_k + bool(self.rank and model.qkv_bias), R_v

    def cached_ranks(self, model: ModelShape) -> tuple[int, int]:
        """Columns of the keys' and the values' cached latents."""
        R_k, R_v = map(padded_rank, self.filled_ranks(model))
        return R_k, R_v

    def cache_values(self, model: ModelShape) -> int:
        return 2 * model.head_width + self.key_heads(model) * sum(self.filled_ranks(model))

    def cache_scalars(self, model: ModelShape) -> int:
        return self.key_heads(model) if self.norms_keys(model) else 0

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        if not self.rank:
            return ()
        G = self.key_heads(model)
        return tuple((G, width) for width in self.filled_ranks(model))

    def cache_padding_values(self, model: ModelShape) -> int:
        cached, filled = self.cached_ranks(model), self.filled_ranks(model)
        return self.key_heads(model) * (sum(cached) - sum(filled))

    def decode_flops(self, model: ModelShape) -> int:
        """(a R_v) Bᵀ, and q B; `full` makes the mix matrix M_h(q) instead, three FLOPs an entry."""
        R_k, R_v = self.filled_ranks(model)
        each = 3 if self.rope == "full" else 2
        return (2 * R_v + each * R_k) * model.heads * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """Shared part and values' latents, and the keys' latents; `full` reads them through
        [cos, sin] · M_h(q), K · R more products per head (`lrkv_jax.kernels.lrkv_decode`)."""
        ranks = self.filled_ranks(model)
        exact = 2 * model.head_width * ranks[0] if self.rope == "full" else 0
        return model.heads * (4 * model.head_width + 2 * sum(ranks) + exact)
