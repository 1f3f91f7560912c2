"""The settings that every attention variant has, and where each variant is found.

A variant is a frozen settings class and a layer that the class names. This package's variants are
in `lrkv_jax.models.attention`. The settings of `lrkv.py` are in `lrkv_config.py`, since they are
read without JAX: the layer's module is imported when a layer is made. A variant outside this
package joins under `kind: my_module:MyVariant`; `docs/new_variant.md` has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self, cast, get_args

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from lrkv_jax.config.frozen import Frozen, semantics
from lrkv_jax.errors import LrkvError, nearest

_FOLDER = "lrkv_jax.models.attention"
# The package's variants by kind, in the order in which tables and legends have them.
VARIANTS = {
    "mha": f"{_FOLDER}.grouped_config:MHA",
    "gqa": f"{_FOLDER}.grouped_config:GQA",
    "mqa": f"{_FOLDER}.grouped_config:MQA",
    "mla": f"{_FOLDER}.mla_config:MLA",
    "lrkv": f"{_FOLDER}.lrkv_config:LRKV",
}
# Those of which there are results alone.
RETIRED = {
    "lrkv_tied": f"{_FOLDER}.retired_config:TiedLRKV",
    "mla_latent": f"{_FOLDER}.retired_config:LatentMLA",
}


class ModelShape(Protocol):
    """What a variant reads of the model around it."""

    width: int
    heads: int
    head_width: int
    qk_norm: bool
    qkv_bias: bool


class AttentionConfig(Frozen):
    """The settings and counts of every variant; counts are per layer.

    A subclass that gives itself a `name` is a variant. Its `kind`, which a configuration writes, is
    that name; outside this package it is "module:Class". `layer` names the class of its layer as
    "module:Class", or as "Class" in the variant's module. `styles` gives each mode (None: a
    variant without modes) its color, line style and marker in pictures; others take spare ones.
    """

    name: ClassVar[str]
    layer: ClassVar[str]
    styles: ClassVar[Mapping[str | None, tuple[str, str, str]]] = {}

    kind: str = semantics("The variant; by default the name that it stands under.", "")

    if TYPE_CHECKING:
        # Each variant has separate settings, and its layer reads them.
        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """`AttentionConfig(kind="lrkv", rank=8)` is an `LRKV`."""
        of_kind = variant_class(settings.get("kind")) if cls is AttentionConfig else cls
        return cast(Self, super().__new__(of_kind))

    @classmethod
    def own_kind(cls) -> str:
        """The `kind` in a configuration, from which any process can find this class."""
        path = f"{cls.__module__}:{cls.__name__}"
        return cls.name if path in (*VARIANTS.values(), *RETIRED.values()) else path

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
    def overridden(cls, settings: dict[str, Any], changed: set[str]) -> dict[str, Any]:
        """`settings` without those of a file that what was `changed` leaves no use for."""
        return settings

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """The values of its setting `rope`, the published one first; () if it has none."""
        return get_args(cls.model_fields["rope"].annotation) if "rope" in cls.model_fields else ()

    @classmethod
    def published_mode(cls) -> str | None:
        """The mode of the variant as it was published, which its label leaves out."""
        return next(iter(cls.modes()), None)

    @property
    def mode(self) -> str | None:
        """The setting `rope`; None for a variant that has only one way to place positions."""
        return getattr(self, "rope", None)

    @property
    def size(self) -> int | None:
        """The setting that an ablation varies: key/value heads, latent width or rank; or None."""
        return None

    @property
    def sized(self) -> str:
        """The size as its label has it, "8"; "" without one."""
        return "" if self.size is None else str(self.size)

    @property
    def form(self) -> str:
        """The rest of its label, after name and size: "rope shared", "tied"; "" as published."""
        return "" if self.mode == self.published_mode() else f"rope {self.mode}"

    @property
    def label(self) -> str:
        """Name, size and form as tables and legends write them: MHA, MLA-128, LRKV-8 rope shared.

        The published mode is not written, whichever is the default.
        """
        named = "-".join(filter(None, (self.name.upper(), self.sized)))
        return f"{named} {self.form}" if self.form else named

    @classmethod
    def layer_class(cls) -> Any:
        """The class of its layer, imported now; raises `LrkvError` where there is none."""
        module, _, name = cls.layer.rpartition(":")
        what = f"{cls.__name__}.layer = {cls.layer}"
        there = _imported(what, module or cls.__module__)
        if name not in there:
            classes = [one for one, value in there.items() if isinstance(value, type)]
            raise LrkvError(f"{what}: there is no such class{nearest(name, classes)}")
        return there[name]

    @property
    def rotates_full_keys(self) -> bool:
        """Whether norm and RoPE apply to whole keys, K wide, as gains and biases require."""
        return False

    def check(self, model: ModelShape) -> None:
        """Raise `LrkvError` where this variant cannot have the shape of `model`."""

    @property
    def warning(self) -> str:
        """A warning that a run prints once, at its start, of settings that may not be meant."""
        return ""

    def query_width(self, model: ModelShape) -> int:
        """Width of one head's projected query."""
        return model.head_width

    def logit_width(self, model: ModelShape) -> int:
        """Length of the dot product behind a logit in training."""
        return self.query_width(model)

    def key_heads(self, model: ModelShape) -> int:
        """Key/value heads that whole sequences are attended with, each serving as many queries."""
        return model.heads

    def kv_parameters(self, model: ModelShape) -> int:
        """Parameters that make keys and values."""
        raise NotImplementedError

    def extra_multiplications(self, model: ModelShape) -> int:
        """Multiplications per token in training beyond one for each of `kv_parameters`.

        A parameter that multiplies more tensors than one counts each further time.
        """
        return 0

    def cache_values(self, model: ModelShape) -> int:
        """Values that a token leaves in the cache, each in the cache's dtype."""
        raise NotImplementedError

    def cache_values_published(self, model: ModelShape) -> int:
        """The paper's count of the same."""
        return self.cache_values(model)

    def cache_scalars(self, model: ModelShape) -> int:
        """Float32 scalars that a token leaves in the cache next to its values."""
        return 0

    def cache_padding_values(self, model: ModelShape) -> int:
        """Values allocated for a token in addition to `cache_values`, and always zero."""
        return 0

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        """(rows, values of one) of what a token leaves in an int8 cache in eight bits."""
        return ()

    def decode_flops(self, model: ModelShape) -> int:
        """FLOPs of a new token's attention that do not depend on how many tokens are cached."""
        return 0

    def decode_flops_per_cached_token(self, model: ModelShape) -> int:
        """FLOPs of a new token's attention for each token in the cache: logits and values.

        Two per multiplication, over all heads, as the cache is read here: MLA absorbed, LRKV from
        its factors. Softmax, masks and rotations are left out.
        """
        raise NotImplementedError


def variant_class(kind: Any) -> type[AttentionConfig]:
    """The settings class that a configuration's `kind` names; its module is imported.

    Raises `LrkvError`, naming the nearest kind, where there is none.
    """
    path = (VARIANTS | RETIRED).get(kind, kind) if isinstance(kind, str) else ""
    module, colon, name = path.partition(":")
    if not colon:
        raise LrkvError(f"kind {kind} is unknown{nearest(str(kind), VARIANTS)}")
    there = _imported(f"kind {kind}", module)
    if not _is_variant(there.get(name)):
        own = [one for one, value in there.items() if _is_variant(value)]
        fix = nearest(name, own) if own else ": it defines no AttentionConfig with a name"
        raise LrkvError(f"kind {kind}: {module} has no variant {name}{fix}")
    return there[name]


def _imported(what: str, module: str) -> dict[str, Any]:
    """The names in a module; raises `LrkvError` with `what` names it."""
    try:
        return vars(import_module(module))
    except ModuleNotFoundError as error:
        raise LrkvError(
            f"{what}: there is no module {error.name}: install it, or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # it is another's code, and may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise LrkvError(f"{what}: importing {module} raises {reason}") from error


def _is_variant(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AttentionConfig) and "name" in vars(value)


def variants() -> dict[str, type[AttentionConfig]]:
    """The settings classes of the package's variants, by kind."""
    return {kind: variant_class(kind) for kind in VARIANTS}


def _of_kind(settings: Any) -> Any:
    if isinstance(settings, str):
        variant = variant_class(settings)
        fields = variant.model_fields.items()
        needed = ", ".join(f"{name}=8" for name, field in fields if field.is_required())
        how = f"lrkv_jax.{variant.__name__}({needed})"
        raise LrkvError(f"attention = {settings!r}: give its settings, as in {how}")
    if not isinstance(settings, dict):
        return settings
    return variant_class(settings.get("kind")).model_validate(settings)


# The variant that a mapping's `kind` names.
Attention = Annotated[SerializeAsAny[AttentionConfig], BeforeValidator(_of_kind)]


# Checks and counts that several variants share.


def joined_words(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def padded_rank(rank: int) -> int:
    """Columns of latents that are padded where the cache is made.

    A GPU's bulk copies take rows of 16-byte multiples, in boxes of up to 64 columns, and its
    16-bit products a multiple of 8 of them.
    """
    multiple = 8 if rank <= 64 else 64
    return -(-rank // multiple) * multiple


def check_rank(name: str, rank: int | None, model: ModelShape, at_0: str, at_K: str) -> None:
    if rank and rank > model.head_width:
        raise LrkvError(
            f"attention.{name} = {rank} is larger than head_width = {model.head_width}: "
            f"use 0 ({at_0}) to {model.head_width} ({at_K})"
        )


def check_groups(groups: int, model: ModelShape) -> None:
    if model.heads % groups:
        *choices, last = [str(g) for g in range(1, model.heads + 1) if model.heads % g == 0]
        raise LrkvError(
            f"attention.kv_heads = {groups} does not divide heads = {model.heads}: "
            f"use {' or '.join(filter(None, [', '.join(choices), last]))}"
        )
