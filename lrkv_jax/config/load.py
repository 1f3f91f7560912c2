"""From YAML and dotted `key=value` overrides to a `RunConfig`, and back."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from lrkv_jax.config.attention import KINDS, Attention
from lrkv_jax.config.frozen import Frozen
from lrkv_jax.config.inherit import extended, inherited
from lrkv_jax.config.schema import RunConfig
from lrkv_jax.errors import LrkvError


class _Loader(yaml.SafeLoader):
    """YAML whose floats may be written 1e-4 (YAML 1.1 reads that as text), without aliases.

    Nine lines of aliases of aliases are a billion values, and an alias can hold itself.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not taken here: write the value again")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as floats."""


for _yaml in (_Loader, _Dumper):
    _yaml.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in _yaml.yaml_implicit_resolvers.items()
    }
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+([eE][-+]?\d+)?)$"
        ),
        list("-+.0123456789"),
    )


# Also a number of 4,300 digits, a date of the year 0, brackets a thousand deep.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)

_ATTENTION_ELSEWHERE = (
    "model.attention is not set there: choose with attention=NAME and change with attention.KEY"
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a scale's YAML, apply `key=value` overrides, choose the variant, validate.

    `attention=NAME` picks a line of `variants`; `attention.KEY=VALUE` changes the picked line;
    any other dotted key changes that setting. `path` may also be the name of a shipped scale. A
    file that `extends` another, beside it or shipped, changes that one's settings; a file without
    variants starts from a run (`init_from`) and takes over its model.

    Raises `LrkvError` for a missing file, unknown keys (naming the nearest), wrong types and
    impossible shapes.
    """
    path = find_config(path)
    raw = _extended(path, _read(path))
    changes = [_parse_override(text) for text in overrides]
    if "variants" not in raw:
        raw = _from_run(path, raw, changes)
    variants = raw.get("variants")
    if not isinstance(variants, dict) or not variants:
        raise LrkvError(f"{path} lists no variants: give at least `variants: {{mha: {{}}}}`")
    raw["variants"] = variants = {n: _with_kind(n, entry) for n, entry in variants.items()}
    model = raw.get("model")
    if not isinstance(model, dict):
        raise LrkvError(f"{path} has no model: see the files under configs/")
    # A dumped RunConfig repeats its chosen line there; anything else would be ignored.
    if "attention" in model and model["attention"] != variants.get(str(raw.get("attention"))):
        raise LrkvError(_ATTENTION_ELSEWHERE)
    for key, value in changes:
        if key == "attention":
            raw["attention"] = value
    chosen = raw.get("attention")
    if not isinstance(chosen, str) or chosen not in variants:
        raise LrkvError(f"attention = {chosen} is not a variant{_nearest(str(chosen), variants)}")
    _drop_other_length(raw, changes)
    for key, value in changes:
        if key != "attention":
            if key.startswith("attention."):
                key = f"variants.{chosen}.{key.removeprefix('attention.')}"
            _set(raw, key, value)
    if not isinstance(raw["variants"], dict) or chosen not in raw["variants"]:
        raise LrkvError(f"variants = {raw['variants']}: name one, as in variants.lrkv.rank=64")
    # Once more: an override may have added a line or changed a kind.
    raw["variants"] = variants = {n: _with_kind(n, entry) for n, entry in raw["variants"].items()}
    try:
        entry = TypeAdapter(Attention).validate_python(variants[chosen], strict=True)
    except ValidationError as error:
        raise LrkvError(f"{path.name}: {_first(error, ('attention',))}") from error
    if isinstance(raw["model"], dict):
        raw["model"]["attention"] = entry
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise LrkvError(f"{path.name}: {_first(error)}") from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same object."""
    raw = config.model_dump(mode="json")
    raw["variants"][config.attention] = raw["model"].pop("attention")
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False)


def find_config(path: str | Path) -> Path:
    """The file itself, or the shipped scale of that name; raises `LrkvError` if neither."""
    path = Path(path)
    if path.is_file():
        return path
    package = Path(__file__).parents[1]
    shipped = [d for d in (package.parent / "configs", package / "configs") if d.is_dir()]
    name = path.name.removesuffix(".yaml")
    for folder in shipped:
        if (folder / f"{name}.yaml").is_file() and path.parent in (Path("."), Path("configs")):
            return folder / f"{name}.yaml"
    names = sorted(f.stem for folder in shipped for f in folder.glob("*.yaml"))
    raise LrkvError(f"no configuration {path}{_nearest(name, names)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except _NOT_YAML as error:
        raise LrkvError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(raw, dict):
        raise LrkvError(f"{path} is not a mapping of settings: see the files under configs/")
    return raw


def _extended(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The file with the one that it extends underneath."""
    if "extends" not in raw:
        return raw
    name = raw["extends"]
    if not isinstance(name, str) or not 0 < len(name) < 200:
        raise LrkvError(f"{path}: extends = {str(name)[:60]}: name a file beside it, or a scale")
    beside = path.parent / f"{name.removesuffix('.yaml')}.yaml"
    base = _read(beside if beside.is_file() else find_config(name))
    if "extends" in base:
        raise LrkvError(f"{path} extends {name}, which extends another: extend that one")
    return extended(raw, base)


def _from_run(path: Path, raw: dict[str, Any], changes: list[tuple[str, Any]]) -> dict[str, Any]:
    """A file without variants: they are those of the run that it starts from."""
    run = {**raw, **dict(changes)}.get("init_from")
    if run is None:
        raise LrkvError(
            f"{path} lists no variants: give at least `variants: {{mha: {{}}}}`, or init_from=RUN, "
            "whose model it takes"
        )
    saved = Path(str(run)) / "config.yaml"
    if not saved.is_file():
        raise LrkvError(f"init_from = {run} is not a run: it has no config.yaml")
    load_config(saved)  # whatever is wrong with it is said of it
    return inherited(raw, _read(saved))


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise LrkvError(f"{text!r} is not an override: write key=value, as in train.steps=100")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except _NOT_YAML as error:
        raise LrkvError(f"{text[:200]!r}: the value is not YAML; quote it") from error


def _with_kind(name: str, entry: Any) -> dict[str, Any]:
    entry = {} if entry is None else entry
    if not isinstance(entry, dict):
        raise LrkvError(
            f"variants.{name} = {entry}: write its settings as a mapping, {{}} for none"
        )
    kind = entry.get("kind", name)
    if not isinstance(kind, str) or kind not in KINDS:
        raise LrkvError(f"variants.{name}: kind {kind} is unknown{_nearest(str(kind), KINDS)}")
    return {"kind": kind, **entry}


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    if key == "model.attention" or key.startswith("model.attention."):
        raise LrkvError(_ATTENTION_ELSEWHERE)
    *parents, last = key.split(".")
    node = raw
    for part in parents:
        if node.get(part) is None:  # absent, or a group left empty
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise LrkvError(f"{key}: {part} is a value, not a group of settings")
    node[last] = value


def _drop_other_length(raw: dict[str, Any], changes: list[tuple[str, Any]]) -> None:
    """A run's length is steps, tokens or epochs: an override of one drops the file's others."""
    lengths = ("steps", "tokens", "epochs")
    for one in lengths:
        named = any(key == f"train.{one}" and value is not None for key, value in changes)
        if named and isinstance(raw.get("train"), dict):
            for other in lengths:
                raw["train"].pop(other, None)


def _nearest(word: str, known) -> str:
    known = [str(name) for name in known]
    if not known:
        return ": there is nothing to set there, remove it"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else f": use one of {', '.join(known)}"


def _first(error: ValidationError, prefix: tuple[str, ...] = ()) -> str:
    """The first problem as `key = value: what is wrong`, without the union's tags."""
    problems = error.errors()
    # A misspelt key is also a missing one; its spelling is the mend.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in problem["loc"]]
    if len(location) > 2 and location[0] == "variants":
        location.pop(2)  # the discriminator's tag
    elif prefix:
        location.pop(0)
    key = ".".join([*prefix, *location])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_nearest(location[-1], _siblings(problem, prefix))}"
    if problem["type"] == "missing":
        return f"{key} is missing: give it a value"
    message = problem["msg"].removeprefix("Input ")
    return f"{key} = {repr(problem['input'])[:200]} {message[0].lower()}{message[1:]}"


def _siblings(problem, prefix: tuple[str, ...]) -> list[str]:
    """The keys that exist where an unknown one was found."""
    if prefix:
        return [k for k in KINDS[problem["loc"][0]].model_fields if k != "kind"]
    model: Any = RunConfig
    for part in problem["loc"][:-1]:
        if part in KINDS:
            model = KINDS[part]
        elif issubclass(model, Frozen) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = annotation if isinstance(annotation, type) else model
    return [k for k in model.model_fields if k != "kind"]
