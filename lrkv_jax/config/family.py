"""The package's lines of the family as configuration: settings, checks and closed-form counts.

D model width  H heads  G key/value heads  K head width  R residual rank  C latent width
P rope-key width
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from lrkv_jax.config.attention import AttentionConfig, ModelShape
from lrkv_jax.config.frozen import NonNegative, Positive, semantics
from lrkv_jax.errors import LrkvError

# FLOPs that take as long as one value more written and read, with its gradient. On two CPU cores
# (float32) the forms measure equal between 485 and 960; XLA's count of bytes for an H200 and the
# datasheet's ratio of FLOPs to bytes make it about 1,100 in bfloat16.
VALUE = 800


class _Grouped(AttentionConfig):
    layer: ClassVar[str] = "lrkv_jax.models.attention.grouped:GroupedAttention"
    whole_keys: ClassVar = True

    def groups(self, model: ModelShape) -> int:
        """Key/value heads G."""
        raise NotImplementedError

    def key_heads(self, model: ModelShape) -> int:
        return self.groups(model)

    def kv_parameters(self, model: ModelShape) -> int:
        return 2 * model.width * self.groups(model) * model.head_width

    def cache_values(self, model: ModelShape) -> int:
        return 2 * self.groups(model) * model.head_width

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        return ((2 * self.groups(model), model.head_width),)

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        return 4 * model.heads * model.head_width


class MHA(_Grouped):
    """Multi-head attention: each head has its own keys and values."""

    name: ClassVar[str] = "mha"
    looks: ClassVar = {None: ("#000000", "-", "o")}

    def groups(self, model: ModelShape) -> int:
        return model.heads


class GQA(_Grouped):
    """Grouped-query attention: `kv_heads` key/value heads, each serving H / kv_heads queries."""

    name: ClassVar[str] = "gqa"
    looks: ClassVar = {None: ("#56B4E9", "--", "s")}
    kv_heads: Positive = semantics("Key/value heads, G. They divide the model's heads.")

    def check(self, model: ModelShape) -> None:
        _check_groups(self.kv_heads, model)

    @property
    def size(self) -> int:
        return self.kv_heads

    def on_shard(self, model: ModelShape, tensor: int) -> GQA:
        return GQA(kv_heads=_groups_on_shard(self.kv_heads, model, tensor))

    def groups(self, model: ModelShape) -> int:
        return self.kv_heads


class MQA(_Grouped):
    """Multi-query attention: one key and value head for all queries."""

    name: ClassVar[str] = "mqa"
    looks: ClassVar = {None: ("#0072B2", ":", "v")}

    def groups(self, model: ModelShape) -> int:
        return 1


class MLA(AttentionConfig):
    """Multi-head latent attention: one latent per token, expanded into each head's keys and values.

    `rope`: `decoupled` puts positions into one rope key beside the latent (DeepSeek's);
    `qk_rope_head_dim = 0` reproduces the paper's cache count there, and drops positions altogether.
    `full` rotates each head's whole key, and has no rope key. With `rank` each head has a latent
    of its own beside the common one; in `full`, keys, values and those latents may be of G groups
    of heads (`kv_heads`).
    """

    name: ClassVar[str] = "mla"
    layer: ClassVar[str] = "lrkv_jax.models.attention.mla:LatentAttention"
    looks: ClassVar = {
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
        "What positions rotate. decoupled: a rope key beside the latent; full: each head's whole "
        "key.",
        "decoupled",
    )
    rank: NonNegative = semantics(
        "Width of the latent that each head has of its own, beside the common one, R.", 0
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
        """A file's rope width is of its own mode: another mode's is not asked for with it."""
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
        return _words(super().form, rank, groups, "" if self.latent_norm else "no latent norm")

    def groups(self, model: ModelShape) -> int:
        """G, the keys and values of a layer."""
        return self.kv_heads or model.heads

    def key_heads(self, model: ModelShape) -> int:
        return self.groups(model)

    def on_shard(self, model: ModelShape, tensor: int) -> Self:
        return _on_shard(self, model, tensor)

    @property
    def whole_keys(self) -> bool:
        return self.rope == "full"

    @property
    def cached_rank(self) -> int:
        """Columns of a head's own cached latents."""
        return _cached_rank(self.rank)

    def check(self, model: ModelShape) -> None:
        _check_rank("rank", self.rank, model, "no latents of single heads", "spans MHA")
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
            _check_groups(self.kv_heads, model)

    def query_width(self, model: ModelShape) -> int:
        return model.head_width + self.qk_rope_head_dim

    def kv_parameters(self, model: ModelShape) -> int:
        down = self.kv_lora_rank + self.qk_rope_head_dim + self.groups(model) * self.rank
        up = 2 * (self.kv_lora_rank + self.rank) * self.groups(model) * model.head_width
        return model.width * down + up

    def cached_latent(self, model: ModelShape) -> int:
        """Columns of the cached common latent; with biases of keys one more, a 1 for them."""
        return self.kv_lora_rank + model.qkv_bias

    def cache_values(self, model: ModelShape) -> int:
        return self.cached_latent(model) + self.qk_rope_head_dim + self.groups(model) * self.rank

    def cache_values_published(self, model: ModelShape) -> int:
        return self.cache_values(model) - self.qk_rope_head_dim

    def cache_padding_values(self, model: ModelShape) -> int:
        return self.groups(model) * (self.cached_rank - self.rank)

    def cache_scalars(self, model: ModelShape) -> int:
        return self.groups(model) if self.rope == "full" and model.qk_norm else 0

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        private = ((self.groups(model), self.rank),) if self.rank else ()
        return ((1, self.cached_latent(model)), *private)

    def decode_flops(self, model: ModelShape) -> int:
        """q W_up, and (a c) W_up; `full` makes M_h(q) in place of q W_up, three FLOPs an entry."""
        each = 3 if self.rope == "full" else 2
        return (2 + each) * model.heads * (self.cached_latent(model) + self.rank) * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """`full` meets latents through [cos, sin] · M_h(q), K · (C + R) more products per head."""
        width = self.cached_latent(model) + self.rank
        exact = 2 * model.head_width * width if self.rope == "full" else 0
        return model.heads * (4 * width + 2 * self.qk_rope_head_dim + exact)


class LRKV(AttentionConfig):
    """Low-rank key-value attention: one shared projection and a rank-R residual for each head.

    Keys and values may have ranks of their own, R_k and R_v (`rank_key`, `rank_value`). With
    `kv_heads`, G groups of query heads have a residual each.
    `rope`: `full`, the default, rotates the whole key, as the paper trains it; `shared` rotates the
    shared part alone; `latent` rotates the shared part and, in R dimensions, the latent.
    """

    name: ClassVar[str] = "lrkv"
    layer: ClassVar[str] = "lrkv_jax.models.attention.lrkv:LowRankAttention"
    looks: ClassVar = {
        "full": ("#D55E00", "-", "^"),
        "shared": ("#E69F00", "--", "P"),
        "latent": ("#009E73", "-.", "X"),
    }
    rank: NonNegative = semantics(
        "Rank of each head's residual, R. 0 is MQA; head_width can represent any MHA."
    )
    rope: Literal["full", "shared", "latent"] = semantics(
        "What positions rotate. full: the whole key, as in the paper; shared: its shared part "
        "alone; latent: its shared part, and the latent in its own R coordinates.",
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

    @property
    def size(self) -> int:
        return self.rank

    @property
    def whole_keys(self) -> bool:
        return not self.rank or self.rope == "full"

    def groups(self, model: ModelShape) -> int:
        """G, the residuals of a layer; at rank 0 the one key and value that all heads have."""
        return (self.kv_heads or model.heads) if self.rank else 1

    def on_shard(self, model: ModelShape, tensor: int) -> Self:
        return _on_shard(self, model, tensor)

    @property
    def ranks(self) -> tuple[int, int]:
        """R_k and R_v."""
        return self.rank_key or self.rank, self.rank_value or self.rank

    @property
    def remark(self) -> str:
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
        return super().sized if R_k == R_v else f"{R_k}/{R_v}"

    @property
    def form(self) -> str:
        groups = "" if self.kv_heads is None else f"in {self.kv_heads} groups"
        return _words(super().form, groups)

    def check(self, model: ModelShape) -> None:
        given = {"rank": self.rank, "rank_key": self.rank_key, "rank_value": self.rank_value}
        for name, rank in given.items():
            _check_rank(name, rank, model, "MQA", "spans MHA")
        if not self.rank and (self.rank_key or self.rank_value or self.kv_heads):
            raise LrkvError(
                "attention.rank = 0 is MQA, which has no residuals: leave out rank_key, rank_value "
                "and kv_heads, or give rank 1 or more"
            )
        if self.kv_heads is not None:
            _check_groups(self.kv_heads, model)

    def key_heads(self, model: ModelShape) -> int:
        return self.groups(model)

    def logit_width(self, model: ModelShape) -> int:
        return model.head_width + (0 if self.rope == "full" else self.ranks[0])

    def kv_parameters(self, model: ModelShape) -> int:
        down = 2 * model.head_width + self.groups(model) * sum(self.ranks)
        return model.width * down + self.groups(model) * sum(self.ranks) * model.head_width

    def extra_multiplications(self, model: ModelShape) -> int:
        # B^K takes H queries to the latents; the norms of G keys need r B^K as well. One of the G
        # is in `kv_parameters`.
        if self.rope == "full":
            return 0
        uses = model.heads + self.groups(model) * (model.qk_norm - 1)
        return uses * self.ranks[0] * model.head_width

    def forms_weights(self, width: int, groups: int, head_width: int, tokens: int) -> bool:
        """Whether training forms head weights W_h = W_shared + U_h B_hᵀ, once per layer and step.

        A key or a value of head h is then x W_h, and costs, forward and backward and over all H
        heads (or `groups` of them), 6·D·H·K FLOPs per token and 6·D·H·R·K per layer. The factors,
        (x U_h) B_hᵀ + x W_shared, cost 6·(D·K + D·H·R + H·R·K) per token, but move about H·(R + K)
        values more: latents, and the sum of the two parts. Weights are formed where that is dearer:

            VALUE · H·(R + K)  >  6·(D·H·K − D·K − H·R·(D + K)) + 6·D·H·R·K / tokens

        R is the mean of R_k and R_v. Wide models with R well below K keep the factors; small ones,
        and ranks near K, form the weights.
        """
        D, H, K, R = width, groups, head_width, sum(self.ranks) / 2
        factors = D * K + D * H * R + H * R * K
        saved = 6 * (D * H * K - factors) + 6 * D * H * R * K / tokens
        return bool(self.rank) and VALUE * H * (R + K) > saved

    def multiplications(self, model: ModelShape, tokens: int) -> float:
        D, G, K = model.width, self.groups(model), model.head_width
        if not self.forms_weights(D, G, K, tokens):
            return super().multiplications(model, tokens)
        # Weights of values are formed in every mode, those of keys where the whole key is rotated.
        R_k, R_v = self.ranks
        keys = D * G * K * (1 + R_k / tokens)
        if self.rope != "full":
            keys = D * K + G * R_k * (D + K) + self.extra_multiplications(model)
        return keys + D * G * K * (1 + R_v / tokens)

    def filled_ranks(self, model: ModelShape) -> tuple[int, int]:
        """Columns of cached latents that are not zero: R_k, with keys' biases a 1 more, and R_v."""
        R_k, R_v = self.ranks
        return R_k + bool(self.rank and model.qkv_bias), R_v

    def cached_ranks(self, model: ModelShape) -> tuple[int, int]:
        """Columns of the keys' and the values' cached latents."""
        R_k, R_v = map(_cached_rank, self.filled_ranks(model))
        return R_k, R_v

    def cache_values(self, model: ModelShape) -> int:
        return 2 * model.head_width + self.groups(model) * sum(self.filled_ranks(model))

    def cache_scalars(self, model: ModelShape) -> int:
        return self.groups(model) if model.qk_norm else 0

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        if not self.rank:
            return ()
        G = self.groups(model)
        return tuple((G, width) for width in self.filled_ranks(model))

    def cache_padding_values(self, model: ModelShape) -> int:
        cached, filled = self.cached_ranks(model), self.filled_ranks(model)
        return self.groups(model) * (sum(cached) - sum(filled))

    def decode_flops(self, model: ModelShape) -> int:
        """(a R_v) Bᵀ, and q B; `full` makes the mix matrix M_h(q) instead, three FLOPs an entry."""
        R_k, R_v = self.filled_ranks(model)
        each = 3 if self.rope == "full" else 2
        return (2 * R_v + each * R_k) * model.heads * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """Shared part and values' latents, and the keys' latents; `full` meets them through
        [cos, sin] · M_h(q), K · R more products per head (`lrkv_jax.kernels.lrkv_decode`)."""
        ranks = self.filled_ranks(model)
        exact = 2 * model.head_width * ranks[0] if self.rope == "full" else 0
        return model.heads * (4 * model.head_width + 2 * sum(ranks) + exact)


def _words(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _cached_rank(rank: int) -> int:
    """Columns of latents that are padded where the cache is made.

    A GPU's bulk copies take rows of 16-byte multiples, in boxes of up to 64 columns, and its
    16-bit products a multiple of 8 of them.
    """
    multiple = 8 if rank <= 64 else 64
    return -(-rank // multiple) * multiple


def _check_rank(name: str, rank: int | None, model: ModelShape, at_0: str, at_K: str) -> None:
    if rank and rank > model.head_width:
        raise LrkvError(
            f"attention.{name} = {rank} is larger than head_width = {model.head_width}: "
            f"use 0 ({at_0}) to {model.head_width} ({at_K})"
        )


def _check_groups(groups: int, model: ModelShape) -> None:
    if model.heads % groups:
        *choices, last = [str(g) for g in range(1, model.heads + 1) if model.heads % g == 0]
        raise LrkvError(
            f"attention.kv_heads = {groups} does not divide heads = {model.heads}: "
            f"use {' or '.join(filter(None, [', '.join(choices), last]))}"
        )


def _on_shard[E: AttentionConfig](entry: E, model: ModelShape, tensor: int) -> E:
    """An entry whose `kv_heads` may be None, of one tensor shard by itself."""
    if entry.kv_heads is None:
        return entry
    groups = _groups_on_shard(entry.kv_heads, model, tensor)
    return entry.model_copy(update={"kv_heads": groups})


def _groups_on_shard(groups: int, model: ModelShape, tensor: int) -> int:
    # Groups that `tensor` does not divide stay whole; a shard reads those of its own heads.
    heads = model.heads // tensor
    most = min(heads, groups // tensor if groups % tensor == 0 else groups)
    return next(g for g in range(most, 0, -1) if heads % g == 0)
