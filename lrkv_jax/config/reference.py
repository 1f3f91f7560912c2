"""The reference of every setting: key, type, default, role and meaning."""

import difflib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from lrkv_jax.config.attention import AttentionConfig, variants
from lrkv_jax.config.frozen import ROLES, Frozen, Group, Role, role_of
from lrkv_jax.config.schema import RunConfig
from lrkv_jax.errors import LrkvError, nearest

# Groups whose settings are listed at another group of their kind.
_SHOWN_ELSEWHERE = {"data.mixture.heldout", "train.teacher_model"}


@dataclass(frozen=True)
class Described:
    """One setting: its dotted key, what it takes, its default as YAML, its role, its meaning."""

    key: str
    type: str
    default: str
    role: Role
    meaning: str


def all_settings(prefix: str = "") -> list[Described]:
    """The settings whose key is `prefix` or is below it, in the order of the configuration.

    The settings of each attention variant are under `attention`. Raises `LrkvError`,
    naming the nearest, where there is none.
    """
    found = [setting for setting in _below(RunConfig, "") if setting.key != "model.attention"]
    found += _attention()
    keys = [setting.key for setting in found]
    groups = [key.rpartition(".")[0] for key in keys if "." in key]
    chosen = [s for s in found if not prefix or f"{s.key}.".startswith(f"{prefix.rstrip('.')}.")]
    if not chosen:
        # Of a name like none of them, all keys would be a line of thousands of characters.
        known = [*keys, *groups]
        near = difflib.get_close_matches(prefix, known, n=1, cutoff=0.5)
        top = dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
        raise LrkvError(f"no setting {prefix}{nearest(prefix, known if near else top)}")
    return chosen


def _below(group: type[Group], prefix: str) -> Iterator[Described]:
    for name, field in group.model_fields.items():
        key, role = prefix + name, role_of(field)
        inner = None if key in _SHOWN_ELSEWHERE else _group_of(field.annotation)
        if role is not None:
            yield _setting(key, field, role)
        if inner is not None:
            yield from _below(inner, f"{key}.")


def _attention() -> Iterator[Described]:
    for kind, entry in variants().items():
        for name, field in entry.model_fields.items():
            if name != "kind":
                described = _setting(f"attention.{name}", field, "semantics")
                yield replace(described, meaning=f"({kind}) {described.meaning}")


def _setting(key: str, field: FieldInfo, role: Role) -> Described:
    default = "required" if field.is_required() else _yaml(field.get_default())
    meaning = field.description or ""
    return Described(key, _type(field.annotation, field.metadata), default, role, meaning)


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type(annotation: Any, limits: list[Any]) -> str:
    """The type of a setting, in words; limits as in `int > 0`."""
    if hasattr(annotation, "__metadata__"):
        inner = [m for one in annotation.__metadata__ for m in getattr(one, "metadata", [one])]
        return _type(annotation.__origin__, [*inner, *limits])
    kinds = get_args(annotation)
    if NoneType in kinds:
        (kind,) = (one for one in kinds if one is not NoneType)
        return f"{_type(kind, limits)}, null"
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, kinds))
    if get_origin(annotation) in (tuple, dict):
        return "list" if get_origin(annotation) is tuple else "map"
    if isinstance(annotation, type) and issubclass(annotation, AttentionConfig):
        return "kind and its settings"
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return "group"
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {getattr(limit, name):g}".replace("4.29497e+09", "2³²")
        for limit in limits
        for name, sign in signs.items()
        if getattr(limit, name, 2**63) < 2**63
    ]
    names = {int: "int", float: "float", bool: "true, false", str: "text"}
    return " ".join([names[annotation], ", ".join(bounds)]).strip()


def _group_of(annotation: Any) -> type[Group] | None:
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((kind for kind in kinds if issubclass(kind, Group)), None)


def as_text(settings: list[Described], width: int = 80) -> str:
    """A line per setting, and its meaning below; no word is broken."""
    lines = []
    for one in settings:
        head = f"{one.key}  {one.type}  (default: {one.default}; {one.role})"
        if one.default == "required":
            head = f"{one.key}  {one.type}  (required; {one.role})"
        for text, indent in ((head, ""), (one.meaning, "    ")):
            lines += textwrap.wrap(
                text, width, initial_indent=indent, subsequent_indent="    ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return "\n".join(lines)


def as_markdown() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings", "",
        "Written by `lrkv settings --markdown` from the descriptions in `lrkv_jax/config/`; a test "
        "holds it current.",
        "A setting is written `KEY=VALUE` on the command line, or as nested keys in a YAML file.",
        "", "| role | what it means |", "|---|---|",
        *(f"| {role} | {meaning} |" for role, meaning in ROLES.items()), "",
        "A run resumes only with the settings of the roles `semantics` and `data` that it was "
        "trained with ([training.md](training.md)).",
        "The settings under `attention` are those of the chosen variant; a file writes them under "
        "`variants`.",
    ]  # fmt: skip
    groups: dict[str, list[Described]] = {}
    for setting in all_settings():
        groups.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    for name, settings in groups.items():
        lines += ["", f"## `{name}`" if name else "## The run", ""]
        lines += ["| setting | takes | default | role | meaning |", "|---|---|---|---|---|"]
        for one in settings:
            last = one.key.rpartition(".")[2]
            lines.append(
                f"| `{last}` | {one.type} | `{one.default}` | {one.role} | {one.meaning} |"
            )
    return "\n".join(lines) + "\n"
