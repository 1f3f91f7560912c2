"""The base of every configuration object (frozen, strict, no unknown keys), and how a setting is
declared: its default, its description and its role, once, at its field."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


def _whole(value: Any) -> Any:
    """50e9, which YAML reads as a float, as the integer that it is; anything else as it came."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if exact else value


Positive = Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=2**63)]
NonNegative = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Path = Annotated[str, Field(min_length=1, pattern=r"\A[^\x00]*\z")]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what the generators of JAX and Grain take

Role = Literal["result", "content", "rhythm", "place"]
ROLES: dict[Role, str] = {
    "result": "It changes the numbers that training computes.",
    "content": "It names data whose content changes the numbers; where that lies does not.",
    "rhythm": "It says when a run pauses and how its work is cut up. Losses stay what they are.",
    "place": "It says where things lie, and which devices, kernels and processes do the work.",
}


class Frozen(BaseModel):
    """Immutable, hashable settings; a misspelt key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _setting(role: Role, description: str, default: Any = ..., **limits: Any) -> Any:
    """A setting of this role; `limits` go to `pydantic.Field`."""
    about: dict[str, Any] = {"role": role, "inherited": limits.pop("inherited", False)}
    return Field(default, description=description, json_schema_extra=about, **limits)


# A field is declared by the name of its role, as in `result("Number of blocks, L.")`.
result = partial(_setting, "result")
content = partial(_setting, "content")
rhythm = partial(_setting, "rhythm")
place = partial(_setting, "place")


class Group(Frozen):
    """Settings that each have a description and a role; or groups of such settings.

    A field made with `inherited=True` is taken over from the run that `init_from` names.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, field in cls.model_fields.items():
            if not field.description:
                raise TypeError(f"{cls.__name__}.{name} has no description")
            if role_of(field) is None and not _is_group(field.annotation):
                raise TypeError(f"{cls.__name__}.{name} has no role: use one of {list(ROLES)}")


def role_of(field: FieldInfo) -> Role | None:
    """The role of a setting; None of a group, whose settings have their own."""
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


def _is_group(annotation: Any) -> bool:
    kinds = get_args(annotation) or (annotation,)
    return all(isinstance(kind, type) and issubclass(kind, Group) for kind in kinds)
