"""The base of every configuration object (frozen, strict, no unknown keys), and how a setting is
declared: its default, its description and its role, once, at its field."""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lrkv_jax.config.old_names import RENAMED
from lrkv_jax.errors import LrkvError, nearest

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

# Names that transformers' configurations have for settings of a model or a run.
FROM_TRANSFORMERS = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "head_dim": "head_width",
    "intermediate_size": "feed_forward",
    "vocab_size": "vocabulary",
    "num_key_value_heads": "attention.kv_heads",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "max_position_embeddings": "train.seq_len",
    "hidden_act": "activation",
    "rope_theta": "rope_base",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_head",
    "attention_bias": "qkv_bias",
    "torch_dtype": "dtype",
}
# The type of pydantic's error for a key that a group does not have.
_UNKNOWN = "unknown_key"
_RENAMED = {old: new for names in RENAMED.values() for old, new in names.items()}


def whole_number(value: Any) -> Any:
    """50e9, a float to YAML, and 50B as the integers that they are; anything else as it came."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, str) and (parts := re.fullmatch(r"(\d+(?:\.\d+)?)(e\d\d?|[MBT])", value)):
        power = int(parts[2][1:] or 6 + 3 * "MBT".index(parts[2]))
        number = Decimal(parts[1]).scaleb(power)
        return int(number) if number == number.to_integral_value() else value
    return value


Positive = Annotated[int, BeforeValidator(whole_number), Field(gt=0, lt=2**63)]
NonNegative = Annotated[int, BeforeValidator(whole_number), Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Path = Annotated[str, Field(min_length=1, pattern=r"\A[^\x00]*\z")]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what the generators of JAX and Grain take

Role = Literal["semantics", "data", "schedule", "placement"]
ROLES: dict[Role, str] = {
    "semantics": "It changes the numbers that training computes.",
    "data": "It names data whose content changes the numbers; where that lies does not.",
    "schedule": "It says when a run pauses and how its work is cut up. Losses stay what they are.",
    "placement": "It says where things lie, and which devices, kernels and processes do the work.",
}


class _OneLine(ModelMetaclass):
    """A class whose call raises `LrkvError` where a setting is wrong, and no page of pydantic."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        if values:
            own = cast("type[Frozen]", cls)
            first = next(name for name in own.model_fields if name != "kind")
            raise LrkvError(f"{cls.__name__} takes its settings by name: {first}={values[0]!r}")
        try:
            return super().__call__(**settings)
        except ValidationError as error:
            raise LrkvError(f"{cls.__name__}: {first_problem(error)}") from error


class Frozen(BaseModel, metaclass=_OneLine):
    """Immutable settings; a misspelled key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, settings: Any) -> Any:
        """Refuse an unknown key here: pydantic's error does not tell a variant's class."""
        for key in map(str, settings) if isinstance(settings, dict) else ():
            if key not in cls.model_fields:
                fix = _instead(key, [name for name in cls.model_fields if name != "kind"])
                raise PydanticCustomError(_UNKNOWN, "{key}{fix}", {"key": key, "fix": fix})
        return settings


def _setting(role: Role, description: str, default: Any = ..., **limits: Any) -> Any:
    """A setting of this role; `limits` go to `pydantic.Field`."""
    about: dict[str, Any] = {"role": role, "inherited": limits.pop("inherited", False)}
    return Field(default, description=description, json_schema_extra=about, **limits)


# A field is declared by the name of its role, as in `semantics("Number of blocks, L.")`.
semantics = partial(_setting, "semantics")
data = partial(_setting, "data")
schedule = partial(_setting, "schedule")
placement = partial(_setting, "placement")


class Group(Frozen):
    """Settings that each have a description and a role; or groups of such settings.

    A field made with `inherited=True` is taken over from the run that `init_from` names.
    """


def role_of(field: FieldInfo) -> Role | None:
    """The role of a setting; None for a group, each of whose settings has a role."""
    return _about(field).get("role")


def inherited_settings(group: type[Group]) -> list[str]:
    """The settings of a group that a run takes over from the one that it starts from."""
    return [n for n, field in group.model_fields.items() if _about(field).get("inherited")]


def walk(group: Group, prefix: str = "") -> Iterator[tuple[str, Role, Any]]:
    """Each setting below a group: its dotted key, its role and its value.

    A group that is absent is one setting, and so is an attention entry.
    """
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, Group):
            yield from walk(value, f"{prefix}{name}.")
        else:
            role = role_of(field)
            assert role is not None, f"{prefix}{name}"
            yield prefix + name, role, value


def _about(field: FieldInfo) -> dict[str, Any]:
    about = field.json_schema_extra
    return about if isinstance(about, dict) else {}


def first_problem(error: ValidationError, group: str = "") -> str:
    """The first problem as `key = value: what is wrong`."""
    problems = error.errors()
    # What is missing elsewhere may be what a misspelled key was to give.
    problem = next((p for p in problems if p["type"] == _UNKNOWN), problems[0])
    location = [str(part) for part in problem["loc"]]
    key = ".".join([group, *location] if group else location)
    if problem["type"] == _UNKNOWN:
        return f"unknown key {key}.{problem['msg']}" if key else f"unknown key {problem['msg']}"
    if problem["type"] == "missing":
        return f"{key} is missing: give it a value"
    message = problem["msg"].removeprefix("Input ")
    return f"{key} = {repr(problem['input'])[:200]} {message[0].lower()}{message[1:]}"


def _instead(key: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown key: our name for transformers' field, or nearest."""
    ours = FROM_TRANSFORMERS.get(key) or _RENAMED.get(key, "")
    if ours and ("." in ours or ours in known):
        return f": use {ours}"
    return nearest(key, known)
