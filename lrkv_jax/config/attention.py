"""The attention variants as configuration: their settings, checks and closed-form counts.

One entry per variant. An entry names the module that implements it, so a new variant is one new
file under `attention/` and one new class here.

D model width  H heads  G key/value heads  K head width  R residual rank  C latent width
P rope-key width
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from lrkv_jax.config.frozen import Frozen, NonNegative, Positive
from lrkv_jax.errors import LrkvError


class ModelShape(Protocol):
    """What a variant's entry asks of the model around it."""

    width: int
    heads: int
    head_width: int
    qk_norm: bool


class AttentionConfig(Frozen):
    """What every variant's entry answers; counts are per layer.

    `implementation` is "module:class" under `lrkv_jax.attention`.
    """

    kind: str
    implementation: ClassVar[str]

    def check(self, model: ModelShape) -> None:
        """Raise `LrkvError` where this variant cannot have the shape of `model`."""

    def query_width(self, model: ModelShape) -> int:
        """Width of one head's projected query."""
        return model.head_width

    def logit_width(self, model: ModelShape) -> int:
        """Length of the dot product behind a logit in training."""
        return self.query_width(model)

    def key_heads(self, model: ModelShape) -> int:
        """Key/value heads that whole sequences are attended with, each serving as many queries."""
        return model.heads

    def query_parameters(self, model: ModelShape) -> int:
        """Parameters of the query projection."""
        return model.width * model.heads * self.query_width(model)

    def kv_parameters(self, model: ModelShape) -> int:
        """Parameters that make keys and values."""
        raise NotImplementedError

    def cache_values(self, model: ModelShape) -> int:
        """Values a token leaves in the cache, each in the cache's dtype."""
        raise NotImplementedError

    def cache_values_published(self, model: ModelShape) -> int:
        """The paper's count of the same."""
        return self.cache_values(model)

    def cache_scalars(self, model: ModelShape) -> int:
        """Float32 scalars a token leaves in the cache beside its values."""
        return 0

    def cache_padding_values(self, model: ModelShape) -> int:
        """Values that are allocated for a token beside `cache_values`, and always zero."""
        return 0

    def decode_flops(self, model: ModelShape) -> int:
        """FLOPs of a new token's attention that do not depend on how many tokens are cached."""
        return 0

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """FLOPs of a new token's attention for each token in the cache: logits and values.

        Two a multiplication, over all heads, as the cache is read here: MLA absorbed, LRKV from its
        factors. Softmax, masks and rotations are left out.
        """
        raise NotImplementedError


class _Grouped(AttentionConfig):
    implementation: ClassVar[str] = "grouped:GroupedAttention"

    def groups(self, model: ModelShape) -> int:
        """Key/value heads G."""
        raise NotImplementedError

    def key_heads(self, model: ModelShape) -> int:
        return self.groups(model)

    def kv_parameters(self, model: ModelShape) -> int:
        return 2 * model.width * self.groups(model) * model.head_width

    def cache_values(self, model: ModelShape) -> int:
        return 2 * self.groups(model) * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        return 4 * model.heads * model.head_width


class MHA(_Grouped):
    """Multi-head attention: each head has its own keys and values."""

    kind: Literal["mha"] = "mha"

    def groups(self, model: ModelShape) -> int:
        return model.heads


class GQA(_Grouped):
    """Grouped-query attention: `kv_heads` key/value heads, each serving H / kv_heads queries."""

    kind: Literal["gqa"] = "gqa"
    kv_heads: Positive

    def check(self, model: ModelShape) -> None:
        if model.heads % self.kv_heads:
            choices = [g for g in range(1, model.heads + 1) if model.heads % g == 0]
            raise LrkvError(
                f"attention.kv_heads = {self.kv_heads} does not divide heads = {model.heads}: "
                f"use {' or '.join([', '.join(map(str, choices[:-1])), str(choices[-1])])}"
                if len(choices) > 1
                else f"attention.kv_heads = {self.kv_heads} does not divide heads = 1: use 1"
            )

    def groups(self, model: ModelShape) -> int:
        return self.kv_heads


class MQA(_Grouped):
    """Multi-query attention: one key and value head for all queries."""

    kind: Literal["mqa"] = "mqa"

    def groups(self, model: ModelShape) -> int:
        return 1


class MLA(AttentionConfig):
    """Multi-head latent attention: one latent a token, expanded per head, and one rope key.

    `rope_width = 0` reproduces the paper's cache count (and drops positions altogether).
    """

    kind: Literal["mla"] = "mla"
    implementation: ClassVar[str] = "mla:LatentAttention"
    latent: Positive
    rope_width: NonNegative = 64

    def check(self, model: ModelShape) -> None:
        if self.rope_width % 2:
            raise LrkvError(
                f"attention.rope_width = {self.rope_width} is odd, and rotation works on pairs: "
                f"use {self.rope_width - 1} or {self.rope_width + 1}"
            )

    def query_width(self, model: ModelShape) -> int:
        return model.head_width + self.rope_width

    def kv_parameters(self, model: ModelShape) -> int:
        down = model.width * (self.latent + self.rope_width)
        return down + 2 * self.latent * model.heads * model.head_width

    def cache_values(self, model: ModelShape) -> int:
        return self.latent + self.rope_width

    def cache_values_published(self, model: ModelShape) -> int:
        return self.latent

    def decode_flops(self, model: ModelShape) -> int:
        return 4 * model.heads * self.latent * model.head_width  # q W_up, and (a c) W_up

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        return 2 * model.heads * (2 * self.latent + self.rope_width)


class LRKV(AttentionConfig):
    """Low-rank key-value attention: one shared projection and a rank-R residual for each head.

    `rope`: `full` rotates the whole key (the model as it is trained); `shared` rotates the shared
    part alone; `latent` rotates the shared part and, in R dimensions, the latent.
    """

    kind: Literal["lrkv"] = "lrkv"
    implementation: ClassVar[str] = "lrkv:LowRankAttention"
    rank: NonNegative
    rope: Literal["full", "shared", "latent"] = "full"

    def check(self, model: ModelShape) -> None:
        if self.rank > model.head_width:
            raise LrkvError(
                f"attention.rank = {self.rank} is larger than head_width = {model.head_width}: "
                f"use 0 (MQA) to {model.head_width} (spans MHA)"
            )

    def key_heads(self, model: ModelShape) -> int:
        return model.heads if self.rank else 1

    def logit_width(self, model: ModelShape) -> int:
        return model.head_width + (0 if self.rope == "full" else self.rank)

    def kv_parameters(self, model: ModelShape) -> int:
        shared = model.width * model.head_width
        residual = model.heads * self.rank * (model.width + model.head_width)
        return 2 * (shared + residual)

    def cache_values(self, model: ModelShape) -> int:
        return 2 * (model.head_width + model.heads * self.rank)

    def cache_scalars(self, model: ModelShape) -> int:
        if not model.qk_norm:
            return 0
        return model.heads if self.rank else 1  # without residuals all heads have one key

    def cache_padding_values(self, model: ModelShape) -> int:
        return 2 * model.heads * (self.cached_rank - self.rank)

    def decode_flops(self, model: ModelShape) -> int:
        """(a R_v) Bᵀ, and q B; `full` makes the mix matrix M_h(q) instead, three FLOPs an entry."""
        each = 3 if self.rope == "full" else 2
        return (2 + each) * model.heads * self.rank * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """Shared part and values' latents, and the keys' latents; `full` meets them through
        [cos, sin] · M_h(q), K · R products more a head (`lrkv_jax.kernels.lrkv_decode`)."""
        exact = 2 * model.head_width * self.rank if self.rope == "full" else 0
        return model.heads * (4 * model.head_width + 4 * self.rank + exact)

    @property
    def cached_rank(self) -> int:
        """Columns of a cached latent: R padded, once, where the cache is made.

        A GPU's bulk copies take rows of 16-byte multiples, in boxes of up to 64 columns, and its
        16-bit products a multiple of 8 of them.
        """
        multiple = 8 if self.rank <= 64 else 64
        return -(-self.rank // multiple) * multiple


Attention = Annotated[MHA | GQA | MQA | MLA | LRKV, Field(discriminator="kind")]
KINDS = {c.model_fields["kind"].default: c for c in (MHA, GQA, MQA, MLA, LRKV)}
