"""What every line of the attention family answers as configuration, and the register of them.

A line is an entry, a frozen class that registers itself when it is defined, and a layer that the
entry names; the package's own are in `lrkv_jax.config.family`. Nothing here loads JAX: the layer's
module is imported when a layer is made. An entry outside this package joins under
`kind: my_module:MyEntry`; `docs/new_variant.md` has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self, cast, get_args

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from lrkv_jax.config.frozen import Frozen, semantics
from lrkv_jax.errors import LrkvError, nearest

KINDS: dict[str, type[AttentionConfig]] = {}  # every registered entry, in order of definition
# Those of which there are results alone, and their module.
RETIRED: dict[str, type[AttentionConfig]] = {}
_RETIRED_IN = "lrkv_jax.config.retired"


class ModelShape(Protocol):
    """What an entry asks of the model around it."""

    width: int
    heads: int
    head_width: int
    qk_norm: bool
    qkv_bias: bool


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

    kind: str = semantics("The line of the family; by default the name that it stands under.", "")

    if TYPE_CHECKING:
        # Each line has settings of its own, and its layer reads them.
        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """`AttentionConfig(kind="lrkv", rank=8)` is the entry of that kind."""
        of_kind = entry_class(settings.get("kind")) if cls is AttentionConfig else cls
        return cast(Self, super().__new__(of_kind))

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if "name" in vars(cls):
            (RETIRED if cls.__module__ == _RETIRED_IN else KINDS)[cls.own_kind()] = cls

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
    def overridden(cls, settings: dict[str, Any], changed: set[str]) -> dict[str, Any]:
        """`settings` without those of a file that what was `changed` leaves no use for."""
        return settings

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """The values of its setting `rope`, the published one first; () if it has none."""
        return get_args(cls.model_fields["rope"].annotation) if "rope" in cls.model_fields else ()

    @classmethod
    def published_mode(cls) -> str | None:
        """The mode of the line as it was published, which its label leaves out."""
        return next(iter(cls.modes()), None)

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
        """What its label says beside name and size: "rope shared", "tied"; "" as published."""
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
        """The class of its layer, imported now."""
        module, _, name = cls.layer.rpartition(":")
        return getattr(import_module(module or cls.__module__), name)

    @property
    def whole_keys(self) -> bool:
        """Whether keys are normed and rotated whole, K wide: gains and biases ask for that."""
        return False

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

    def extra_multiplications(self, model: ModelShape) -> int:
        """Multiplications per token in training beyond one for each of `kv_parameters`.

        A parameter that multiplies more tensors than one counts each further time.
        """
        return 0

    def multiplications(self, model: ModelShape, tokens: int) -> float:
        """Multiplications of a token's keys and values in training, as they are executed.

        In steps of `tokens` on one device. Its parameters, unless the layer does otherwise.
        """
        return self.kv_parameters(model) + self.extra_multiplications(model)

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
    if isinstance(kind, str) and kind not in KINDS:
        import_module(_RETIRED_IN)
    if isinstance(kind, str) and kind in RETIRED:
        return RETIRED[kind]
    if not isinstance(kind, str) or kind not in KINDS:
        raise LrkvError(f"kind {kind} is unknown{nearest(str(kind), KINDS)}")
    return KINDS[kind]


def _entry(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return entry_class(settings.get("kind")).model_validate(settings)


# The entry that a mapping's `kind` names.
Attention = Annotated[SerializeAsAny[AttentionConfig], BeforeValidator(_entry)]
