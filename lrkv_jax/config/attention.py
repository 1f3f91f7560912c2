"""The lines of the attention family as configuration: settings, checks and closed-form counts.

A line is an entry, a frozen class that registers itself when it is defined, and a layer that the
entry names. Nothing here loads JAX: the layer's module is imported when a layer is made. An entry
outside this package joins under `kind: my_module:MyEntry`; `docs/new_variant.md` has an example.

D model width  H heads  G key/value heads  K head width  R residual rank  C latent width
P rope-key width
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, get_args

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from lrkv_jax.config.frozen import Frozen, NonNegative, Positive, result
from lrkv_jax.errors import LrkvError, nearest

KINDS: dict[str, type[AttentionConfig]] = {}  # every registered entry, in order of definition


class ModelShape(Protocol):
    """What an entry asks of the model around it."""

    width: int
    heads: int
    head_width: int
    qk_norm: bool


class AttentionConfig(Frozen):
    """What every entry answers; counts are per layer.

    A subclass that gives itself a `name` is a line of the family and registers itself. Its `kind`,
    which a configuration writes, is that name; outside this package it is "module:Class".
    `layer` names the class of its layer as "module:Class", or as "Class" in the entry's own module.
    `looks` gives each mode (None: a line without modes) its colour, line style and marker in
    pictures; a line without them takes spare ones.
    """

    name: ClassVar[str]
    layer: ClassVar[str]
    looks: ClassVar[Mapping[str | None, tuple[str, str, str]]] = {}

    kind: str = result("The line of the family; by default the name that it stands under.", "")

    if TYPE_CHECKING:
        # Each line has settings of its own, and its layer reads them.
        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if "name" in vars(cls):
            KINDS[cls.own_kind()] = cls

    @classmethod
    def own_kind(cls) -> str:
        """What a configuration writes as `kind`: from it any process can find this class."""
        ours = cls.__module__.startswith(f"{__name__.partition('.')[0]}.")
        return cls.name if ours else f"{cls.__module__}:{cls.__name__}"

    @model_validator(mode="before")
    @classmethod
    def _own_kind(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        kind = settings.get("kind", cls.own_kind())
        if kind != cls.own_kind():
            raise LrkvError(f"kind = {kind} is not {cls.__name__}: its kind is {cls.own_kind()}")
        return {**settings, "kind": kind}

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """The values of its setting `rope`; () if it has none."""
        return get_args(cls.model_fields["rope"].annotation) if "rope" in cls.model_fields else ()

    @classmethod
    def usual_mode(cls) -> str | None:
        """The mode of an entry that names none."""
        return cls.model_fields["rope"].default if "rope" in cls.model_fields else None

    @classmethod
    def compared_modes(cls) -> tuple[str, ...]:
        """The modes in which a benchmark takes every entry; () if it takes each in its own."""
        return cls.modes()

    @property
    def mode(self) -> str | None:
        """Its `rope`; None for a line that has only one way to place positions."""
        return getattr(self, "rope", None)

    def in_mode(self, mode: str) -> Self:
        """The same with another `rope`."""
        return self.model_copy(update={"rope": mode})

    @property
    def size(self) -> int | None:
        """What an ablation varies: key/value heads, latent width or rank; None for nothing."""
        return None

    @property
    def sized(self) -> str:
        """The size as its label has it, "8"; "" without one."""
        return "" if self.size is None else str(self.size)

    @property
    def form(self) -> str:
        """What its label says beside name and size: "rope shared", "tied"; "" for the usual one."""
        return "" if self.mode == self.usual_mode() else f"rope {self.mode}"

    @property
    def label(self) -> str:
        """Name, size and form as tables and legends write them: MHA, MLA-128, LRKV-8 rope shared.

        The default mode is not written.
        """
        named = "-".join(filter(None, (self.name.upper(), self.sized)))
        return f"{named} {self.form}" if self.form else named

    @classmethod
    def layer_class(cls) -> Any:
        """The class of its layer, imported now."""
        module, _, name = cls.layer.rpartition(":")
        return getattr(import_module(module or cls.__module__), name)

    def check(self, model: ModelShape) -> None:
        """Raise `LrkvError` where this variant cannot have the shape of `model`."""

    @property
    def remark(self) -> str:
        """What a run says of it once, when it starts: something allowed that may not be meant."""
        return ""

    def on_shard(self, model: ModelShape, tensor: int) -> Self:
        """The entry of one tensor shard by itself, a model of H / `tensor` heads."""
        return self

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

    def parameters_used_twice(self, model: ModelShape) -> int:
        """Parameters that multiply two tensors per token in training, not one."""
        return 0

    def multiplications(self, model: ModelShape, tokens: int) -> float:
        """Multiplications of a token's keys and values in training, as they are executed.

        In steps of `tokens` on one device. Its parameters, unless the layer does otherwise.
        """
        return self.kv_parameters(model) + self.parameters_used_twice(model)

    def cache_values(self, model: ModelShape) -> int:
        """Values that a token leaves in the cache, each in the cache's dtype."""
        raise NotImplementedError

    def cache_values_published(self, model: ModelShape) -> int:
        """The paper's count of the same."""
        return self.cache_values(model)

    def cache_scalars(self, model: ModelShape) -> int:
        """Float32 scalars that a token leaves in the cache beside its values."""
        return 0

    def cache_padding_values(self, model: ModelShape) -> int:
        """Values that are allocated for a token beside `cache_values`, and always zero."""
        return 0

    def decode_flops(self, model: ModelShape) -> int:
        """FLOPs of a new token's attention that do not depend on how many tokens are cached."""
        return 0

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """FLOPs of a new token's attention for each token in the cache: logits and values.

        Two per multiplication, over all heads, as the cache is read here: MLA absorbed, LRKV from
        its factors. Softmax, masks and rotations are left out.
        """
        raise NotImplementedError


class _Grouped(AttentionConfig):
    layer: ClassVar[str] = "lrkv_jax.attention.grouped:GroupedAttention"

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

    name: ClassVar[str] = "mha"
    looks: ClassVar = {None: ("#000000", "-", "o")}

    def groups(self, model: ModelShape) -> int:
        return model.heads


class GQA(_Grouped):
    """Grouped-query attention: `kv_heads` key/value heads, each serving H / kv_heads queries."""

    name: ClassVar[str] = "gqa"
    looks: ClassVar = {None: ("#56B4E9", "--", "s")}
    kv_heads: Positive = result("Key/value heads, G. They divide the model's heads.")

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
    `rope_width = 0` reproduces the paper's cache count there, and drops positions altogether.
    `full` rotates each head's whole key, and `latent` the latent itself, in C dimensions, where
    queries meet it; neither has a rope key. With `rank` each head has a latent of its own beside
    the common one.
    """

    name: ClassVar[str] = "mla"
    layer: ClassVar[str] = "lrkv_jax.attention.mla:LatentAttention"
    looks: ClassVar = {
        "decoupled": ("#CC79A7", "-.", "D"),
        "full": ("#882255", "-", "d"),
        "latent": ("#AA4499", "--", "p"),
    }
    latent: Positive = result("Width of the latent that all heads share, C.")
    rope_width: NonNegative = result(
        "Width of the rope key that all heads share, P. Even; 0 drops positions. In the modes full "
        "and latent there is none: 0.",
        64,
    )
    rope: Literal["decoupled", "full", "latent"] = result(
        "What positions rotate. decoupled: a rope key beside the latent; full: each head's whole "
        "key; latent: the latent in its own C coordinates, and queries there.",
        "decoupled",
    )
    rank: NonNegative = result(
        "Width of the latent that each head has of its own, beside the common one, R.", 0
    )

    @model_validator(mode="before")
    @classmethod
    def _no_rope_key(cls, settings: Any) -> Any:
        """Only `decoupled` has a rope key: what the others leave out is 0."""
        if isinstance(settings, dict) and settings.get("rope") in ("full", "latent"):
            return {"rope_width": 0, **settings}
        return settings

    @classmethod
    def compared_modes(cls) -> tuple[str, ...]:
        return ()  # each mode has settings of its own: a scale writes a line for each

    @property
    def size(self) -> int:
        return self.latent

    @property
    def form(self) -> str:
        return _words(super().form, f"rank {self.rank}" if self.rank else "")

    @property
    def remark(self) -> str:
        return _odd({"latent": self.latent, "rank": self.rank}) if self.rope == "latent" else ""

    @property
    def cached_rank(self) -> int:
        """Columns of a head's own cached latents."""
        return _cached_rank(self.rank)

    def check(self, model: ModelShape) -> None:
        _check_rank("rank", self.rank, model, "no latents of single heads", "spans MHA")
        if self.rope_width % 2:
            raise LrkvError(
                f"attention.rope_width = {self.rope_width} is odd, and rotation works on pairs: "
                f"use {self.rope_width - 1} or {self.rope_width + 1}"
            )
        if self.rope_width and self.rope != "decoupled":
            raise LrkvError(
                f"attention.rope_width = {self.rope_width}, and rope: {self.rope} has no rope key: "
                "leave rope_width out, or use rope: decoupled"
            )

    def query_width(self, model: ModelShape) -> int:
        return model.head_width + self.rope_width

    def logit_width(self, model: ModelShape) -> int:
        return self.latent + self.rank if self.rope == "latent" else self.query_width(model)

    def kv_parameters(self, model: ModelShape) -> int:
        up = 2 * (self.latent + self.rank) * model.heads * model.head_width
        return model.width * self.cache_values(model) + up

    def cache_values(self, model: ModelShape) -> int:
        return self.latent + self.rope_width + model.heads * self.rank

    def cache_values_published(self, model: ModelShape) -> int:
        return self.cache_values(model) - self.rope_width

    def cache_padding_values(self, model: ModelShape) -> int:
        return model.heads * (self.cached_rank - self.rank)

    def cache_scalars(self, model: ModelShape) -> int:
        return model.heads if self.rope == "full" and model.qk_norm else 0

    def decode_flops(self, model: ModelShape) -> int:
        """q W_up, and (a c) W_up; `full` makes M_h(q) in place of q W_up, three FLOPs an entry."""
        each = 3 if self.rope == "full" else 2
        return (2 + each) * model.heads * (self.latent + self.rank) * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """`full` meets latents through [cos, sin] · M_h(q), K · (C + R) more products per head."""
        width = self.latent + self.rank
        exact = 2 * model.head_width * width if self.rope == "full" else 0
        return model.heads * (4 * width + 2 * self.rope_width + exact)


# FLOPs that take as long as one value more written and read, with its gradient. On two CPU cores
# (float32) the forms measure equal between 485 and 960; XLA's count of bytes for an H200 and the
# datasheet's ratio of FLOPs to bytes make it about 1,100 in bfloat16.
VALUE = 800


class LRKV(AttentionConfig):
    """Low-rank key-value attention: one shared projection and a rank-R residual for each head.

    Keys and values may have ranks of their own, R_k and R_v (`rank_key`, `rank_value`). With
    `kv_heads`, G groups of query heads have a residual each.
    `rope`: `full` rotates the whole key (the model as it is trained); `shared` rotates the shared
    part alone; `latent` rotates the shared part and, in R dimensions, the latent.
    """

    name: ClassVar[str] = "lrkv"
    layer: ClassVar[str] = "lrkv_jax.attention.lrkv:LowRankAttention"
    looks: ClassVar = {
        "full": ("#D55E00", "-", "^"),
        "shared": ("#E69F00", "--", "P"),
        "latent": ("#009E73", "-.", "X"),
    }
    rank: NonNegative = result(
        "Rank of each head's residual, R. 0 is MQA; head_width can represent any MHA."
    )
    rope: Literal["full", "shared", "latent"] = result(
        "What positions rotate. full: the whole key; shared: its shared part alone; latent: its "
        "shared part, and the latent in its own R coordinates.",
        "full",
    )
    rank_key: Positive | None = result("Rank of the keys' residuals, R_k. Null is rank.", None)
    rank_value: Positive | None = result("Rank of the values' residuals, R_v. Null is rank.", None)
    kv_heads: Positive | None = result(
        "Number of residuals, G: each serves a group of heads / G query heads. Null: one for each "
        "head.",
        None,
    )
    tied: bool = result(
        "Whether values read what keys read: one shared part and one latent per residual, cached "
        "once. rank_key and rank_value are rank then.",
        False,
    )

    @property
    def size(self) -> int:
        return self.rank

    def groups(self, model: ModelShape) -> int:
        """G, the residuals of a layer; at rank 0 the one key and value that all heads have."""
        return (self.kv_heads or model.heads) if self.rank else 1

    def on_shard(self, model: ModelShape, tensor: int) -> Self:
        if self.kv_heads is None:
            return self
        return self.model_copy(update={"kv_heads": _groups_on_shard(self.kv_heads, model, tensor)})

    @property
    def ranks(self) -> tuple[int, int]:
        """R_k and R_v."""
        return self.rank_key or self.rank, self.rank_value or self.rank

    @property
    def remark(self) -> str:
        name = "rank" if self.rank_key is None else "rank_key"
        return _odd({name: self.ranks[0]}) if self.rope == "latent" else ""

    @property
    def copies(self) -> int:
        """Shared parts, and latents of a residual, that a token leaves: a key's and a value's."""
        return 1 if self.tied else 2

    @property
    def sized(self) -> str:
        R_k, R_v = self.ranks
        return super().sized if R_k == R_v else f"{R_k}/{R_v}"

    @property
    def form(self) -> str:
        groups = "" if self.kv_heads is None else f"in {self.kv_heads} groups"
        return _words(super().form, groups, "tied" if self.tied else "")

    def check(self, model: ModelShape) -> None:
        given = {"rank": self.rank, "rank_key": self.rank_key, "rank_value": self.rank_value}
        for name, rank in given.items():
            _check_rank(name, rank, model, "MQA", "spans MHA")
        if not self.rank and (self.rank_key or self.rank_value or self.kv_heads or self.tied):
            raise LrkvError(
                "attention.rank = 0 is MQA, which has no residuals: leave out rank_key, "
                "rank_value, kv_heads and tied, or give rank 1 or more"
            )
        if self.tied and self.ranks != (self.rank, self.rank):
            raise LrkvError(
                "attention.tied = true, and its keys and values read the same latents: leave out "
                "rank_key and rank_value"
            )
        if self.kv_heads is not None:
            _check_groups(self.kv_heads, model)

    def key_heads(self, model: ModelShape) -> int:
        return self.groups(model)

    def logit_width(self, model: ModelShape) -> int:
        return model.head_width + (0 if self.rope == "full" else self.ranks[0])

    def kv_parameters(self, model: ModelShape) -> int:
        down = model.head_width * self.copies + self.groups(model) * sum(self.ranks[: self.copies])
        return model.width * down + self.groups(model) * sum(self.ranks) * model.head_width

    def parameters_used_twice(self, model: ModelShape) -> int:
        # B^K takes queries to the latent; the key's norm needs the whole key, r B^K, as well.
        twice = self.rope != "full" and model.qk_norm
        return self.groups(model) * self.ranks[0] * model.head_width if twice else 0

    def forms_weights(self, width: int, groups: int, head_width: int, tokens: int) -> bool:
        """Whether training forms head weights W_h = W_shared + U_h B_hᵀ, once per layer and step.

        A key or a value of head h is then x W_h, and costs, forward and backward and over all H
        heads (or `groups` of them), 6·D·H·K FLOPs per token and 6·D·H·R·K per layer. The factors,
        (x U_h) B_hᵀ + x W_shared, cost 6·(D·K + D·H·R + H·R·K) per token, but move about H·(R + K)
        values more: latents, and the sum of the two parts. Weights are formed where that is dearer:

            VALUE · H·(R + K)  >  6·(D·H·K − D·K − H·R·(D + K)) + 6·D·H·R·K / tokens

        R is the mean of R_k and R_v. Tied, keys and values share x U_h and x W_shared. Wide models
        with R well below K keep the factors; small ones, and ranks near K, form the weights.
        """
        D, H, K, R = width, groups, head_width, sum(self.ranks) / 2
        sharing = 2 if self.tied else 1
        factors = (D * K + D * H * R) / sharing + H * R * K
        saved = 6 * (D * H * K - factors) + 6 * D * H * R * K / tokens
        return bool(self.rank) and VALUE * H * (R / sharing + K) > saved

    def multiplications(self, model: ModelShape, tokens: int) -> float:
        D, G, K = model.width, self.groups(model), model.head_width
        if not self.forms_weights(D, G, K, tokens):
            return super().multiplications(model, tokens)
        # Weights of values are formed in every mode, those of keys where the whole key is rotated.
        R_k, R_v = self.ranks
        keys = D * G * K * (1 + R_k / tokens)
        if self.rope != "full":
            keys = D * K + G * R_k * (D + K) + self.parameters_used_twice(model)
        return keys + D * G * K * (1 + R_v / tokens)

    def cache_values(self, model: ModelShape) -> int:
        return self.copies * model.head_width + self.groups(model) * sum(self.ranks[: self.copies])

    def cache_scalars(self, model: ModelShape) -> int:
        return self.groups(model) if model.qk_norm else 0

    def cache_padding_values(self, model: ModelShape) -> int:
        padding = sum(self.cached_ranks[: self.copies]) - sum(self.ranks[: self.copies])
        return self.groups(model) * padding

    def decode_flops(self, model: ModelShape) -> int:
        """(a R_v) Bᵀ, and q B; `full` makes the mix matrix M_h(q) instead, three FLOPs an entry."""
        R_k, R_v = self.ranks
        each = 3 if self.rope == "full" else 2
        return (2 * R_v + each * R_k) * model.heads * model.head_width

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """Shared part and values' latents, and the keys' latents; `full` meets them through
        [cos, sin] · M_h(q), K · R more products per head (`lrkv_jax.kernels.lrkv_decode`)."""
        exact = 2 * model.head_width * self.ranks[0] if self.rope == "full" else 0
        return model.heads * (4 * model.head_width + 2 * sum(self.ranks) + exact)

    @property
    def cached_ranks(self) -> tuple[int, int]:
        """Columns of the keys' and the values' cached latents."""
        R_k, R_v = map(_cached_rank, self.ranks)
        return R_k, R_v


def _odd(widths: Mapping[str, int]) -> str:
    """What a run says where latents of an odd width are rotated."""
    odd = [f"attention.{name} = {width}" for name, width in widths.items() if width % 2]
    if not odd:
        return ""
    return (
        f"{' and '.join(odd)}: odd, so in rope: latent the last coordinate of each latent carries "
        "no position; an even one has all of them rotated"
    )


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


def _groups_on_shard(groups: int, model: ModelShape, tensor: int) -> int:
    # Groups that `tensor` does not divide stay whole; a shard reads those of its own heads.
    heads = model.heads // tensor
    most = min(heads, groups // tensor if groups % tensor == 0 else groups)
    return next(g for g in range(most, 0, -1) if heads % g == 0)


def entry_class(kind: Any) -> type[AttentionConfig]:
    """The entry that a configuration's `kind` names; "module:Class" is imported.

    Raises `LrkvError`, naming the nearest kind, where there is none.
    """
    if isinstance(kind, str) and kind not in KINDS and ":" in kind:
        module, _, name = kind.partition(":")
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise LrkvError(
                f"kind {kind}: there is no module {error.name}: install it, or put its folder on "
                "PYTHONPATH"
            ) from error
        except Exception as error:  # it is another's code, and may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise LrkvError(f"kind {kind}: importing {module} raises {reason}") from error
        if kind not in KINDS:
            own = [one.partition(":")[2] for one in KINDS if one.startswith(f"{module}:")]
            mend = nearest(name, own) if own else ": it defines no AttentionConfig with a name"
            raise LrkvError(f"kind {kind}: {module} has no entry {name}{mend}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise LrkvError(f"kind {kind} is unknown{nearest(str(kind), KINDS)}")
    return KINDS[kind]


def _entry(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return entry_class(settings.get("kind")).model_validate(settings)


# The entry that a mapping's `kind` names.
Attention = Annotated[SerializeAsAny[AttentionConfig], BeforeValidator(_entry)]
