"""From YAML and dotted `key=value` overrides to a `RunConfig`, and back."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lrkv_jax.config.attention import variant_class
from lrkv_jax.config.frozen import Frozen, first_problem, inherited_settings
from lrkv_jax.config.history import asked_dtypes
from lrkv_jax.config.old_names import of_today
from lrkv_jax.config.schema import DataConfig, RunConfig, TrainConfig
from lrkv_jax.errors import LrkvError, nearest


class _Loader(yaml.SafeLoader):
    """YAML whose floats may be written 1e-4 (YAML 1.1 reads that as text), without aliases.

    10:13 is text, where YAML 1.1 reads minutes and seconds. Nine lines of aliases of aliases are a
    billion values, and an alias can hold itself. A key that occurs twice in a mapping is refused:
    YAML would keep the last one.
    """

    def construct_mapping(self, node, deep=False):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"{name} stands twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return super().construct_mapping(node, deep)

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not taken here: write the value again")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as numbers."""


_OURS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int")
for _yaml in (_Loader, _Dumper):
    _yaml.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in _OURS]
        for first, resolvers in _yaml.yaml_implicit_resolvers.items()
    }
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+([eE][-+]?\d+)?)$"
        ),
        list("-+.0123456789"),
    )
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:int",
        re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][\d_]*)$"),
        list("-+0123456789"),
    )


# What a run's config.yaml calls a tokenizer next to it: the run may be moved.
RUN_TOKENIZER = "tokenizer"

# Also a number of 4,300 digits, a date of the year 0, brackets a thousand deep, and a value that is
# not of its tag's kind, as in !!bool maybe and !!timestamp foo.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError)

_ATTENTION_ELSEWHERE = (
    "model.attention is not set there: choose with attention=NAME and change with attention.KEY"
)


def load_config(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a scale's YAML, apply overrides, choose the variant, validate.

    `overrides` are texts `key=value` as on the command line, or a mapping of dotted keys to values,
    of groups to such mappings too.

    `attention=NAME` picks one of `variants`; `attention.KEY=VALUE` changes that one;
    any other dotted key changes that setting. `path` may also be the name of a shipped scale. A
    file that `extends` another, next to it or shipped, changes that one's settings; a file without
    variants starts from a run (`init_from`) and takes over its model.

    Raises `LrkvError` for a missing file, unknown keys (naming the nearest), wrong types and
    impossible shapes.
    """
    path = find_config(path)
    return config_from(_extended(path, _read(path)), path, overrides)


def config_from(
    raw: dict[str, Any], path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> RunConfig:
    """Make a `RunConfig` of settings as YAML has them; messages name `path`. Changes `raw`.

    Settings of earlier versions are read too (`lrkv_jax.config.old_names`).
    """
    path, raw, changes = Path(path), of_today(raw), parse_overrides(overrides)
    if "variants" not in raw:
        raw = _from_run(path, raw, changes)
    variants = raw.get("variants")
    if not isinstance(variants, dict) or not variants:
        raise LrkvError(f"{path} lists no variants: give at least `variants: {{mha: {{}}}}`")
    raw["variants"] = variants = {n: _with_kind(n, entry) for n, entry in variants.items()}
    model = raw.get("model")
    if not isinstance(model, dict):
        raise LrkvError(f"{path} has no model: see the files under configs/")
    # A dumped RunConfig repeats its chosen variant there; anything else would be ignored.
    if "attention" in model and model["attention"] != variants.get(str(raw.get("attention"))):
        raise LrkvError(_ATTENTION_ELSEWHERE)
    # First what makes the variants, of which one is chosen; then what changes the chosen one.
    for key, value in changes:
        if key == "attention" or key.partition(".")[0] == "variants":
            _set(raw, key, value)
    variants, chosen = raw["variants"], raw.get("attention")
    if not isinstance(variants, dict) or not variants:
        raise LrkvError(f"variants = {variants}: name one, as in variants.lrkv.rank=64")
    if not isinstance(chosen, str) or chosen not in variants:
        raise LrkvError(f"attention = {chosen} is not a variant{nearest(str(chosen), variants)}")
    _drop_other_length(raw, changes)
    for key, value in changes:
        if key.startswith("attention."):
            _set(raw, f"variants.{chosen}.{key.removeprefix('attention.')}", value)
        elif key != "attention" and key.partition(".")[0] != "variants":
            _set(raw, key, value)
    # Once more: an override may have added a line or changed a kind.
    raw["variants"] = variants = {n: _with_kind(n, entry) for n, entry in raw["variants"].items()}
    # The chosen variant first, under the name by which an override changes it.
    for name in sorted(variants, key=lambda name: name != chosen):
        key = "attention" if name == chosen else f"variants.{name}"
        kind = variant_class(variants[name]["kind"])
        places = (f"{key}.", f"variants.{name}.")
        own = {at.removeprefix(p) for at, _ in changes for p in places if at.startswith(p)}
        settings = kind.overridden(variants[name], own)
        variants[name] = _validated(path, kind, settings, key)
    if isinstance(raw["model"], dict):
        raw["model"]["attention"] = variants[chosen]
        if isinstance(name := raw["model"].get("window_attention"), str):
            if name not in variants:
                complaint = f"model.window_attention = {name} is not a variant"
                raise LrkvError(complaint + nearest(name, variants))
            raw["model"]["window_attention"] = variants[name]
    return _validated(path, RunConfig, raw)


def parse_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The dotted key and the value of each override that `load_config` takes."""
    if isinstance(overrides, Mapping):
        return list(_dotted(overrides))
    changes: list[tuple[str, Any]] = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, value = _parse_override(text)
        # A group keeps the settings that its mapping does not name; variants are all replaced.
        changes += [(key, value)] if "." in key or key == "variants" else _dotted({key: value})
    return changes


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        # An empty group changes nothing; a mapping below a group may be empty, as a variant's is.
        if isinstance(value, Mapping) and (value or not prefix):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", {} if value == {} else value  # the caller's stays as it is


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same object."""
    return yaml.dump(as_settings(config), Dumper=_Dumper, sort_keys=False)


def as_settings(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain settings that `config_from` reads back."""
    raw = config.model_dump(mode="json")
    raw["variants"][config.attention] = raw["model"].pop("attention")
    return raw


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
    raise LrkvError(f"no configuration {path}{nearest(name, names)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except _NOT_YAML as error:
        raise LrkvError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(raw, dict):
        raise LrkvError(f"{path} is not a mapping of settings: see the files under configs/")
    data, own = raw.get("data"), path.with_name(RUN_TOKENIZER)
    if isinstance(data, dict) and data.get("tokenizer") == RUN_TOKENIZER and own.exists():
        data["tokenizer"] = str(own)
    return raw


def _extended(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The file on top of the one it extends: its settings change single keys, its variants replace.

    An ablation has the model, data and training of its scale, and different variants.
    """
    if "extends" not in raw:
        return raw
    name = raw["extends"]
    if not isinstance(name, str) or not 0 < len(name) < 200:
        raise LrkvError(f"{path}: extends = {str(name)[:60]}: name a file next to it, or a scale")
    beside = path.parent / f"{name.removesuffix('.yaml')}.yaml"
    base = _read(beside if beside.is_file() else find_config(name))
    if "extends" in base:
        raise LrkvError(f"{path} extends {name}, which extends another: extend that one")
    merged = _deep(base, {key: value for key, value in raw.items() if key != "extends"})
    return merged | ({"variants": raw["variants"]} if "variants" in raw else {})


def _from_run(path: Path, raw: dict[str, Any], changes: list[tuple[str, Any]]) -> dict[str, Any]:
    """A file without variants, filled in from the configuration of the run that it starts from.

    The model with its variants and its choice of one, the optimizer's settings, and what data and
    training declare as `inherited` are the run's, each key unless the file has it; the rest is the
    file's. Dtypes are as they were requested. The name joins both.
    """
    run = {**raw, **dict(changes)}.get("init_from")
    if run is None:
        raise LrkvError(
            f"{path} lists no variants: give at least `variants: {{mha: {{}}}}`, or init_from=RUN, "
            "whose model it takes"
        )
    saved = Path(str(run)) / "config.yaml"
    if not saved.is_file():
        raise LrkvError(f"init_from = {run} is not a run: it has no config.yaml")
    load_config(saved)  # an error then names this file
    base = of_today(_read(saved))
    inherited = {key: base[key] for key in ("variants", "model", "optimizer") if base.get(key)}
    for name, group in (("train", TrainConfig), ("data", DataConfig)):
        settings = base.get(name) or {}
        inherited[name] = {k: settings[k] for k in inherited_settings(group) if k in settings}
    if (base.get("data") or {}).get("mixture"):
        inherited["data"]["chats"] = True
    inherited["model"].pop("attention", None)
    # Requested as auto, it became what suits the machine that trained the run.
    model, muon = inherited["model"], inherited.get("optimizer", {}).get("muon", {})
    if "dtype" in model and "dtype" in muon:
        model["dtype"], muon["dtype"] = asked_dtypes(saved.parent, model["dtype"], muon["dtype"])
    name = f"{base['name']}-{raw['name']}" if raw.get("name") else base["name"]
    own = {key: value for key, value in raw.items() if value is not None}
    return {"attention": base["attention"]} | _deep(inherited, own) | {"name": name}


def _deep(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _deep(merged[key], value) if both else value
    return merged


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise LrkvError(f"{text!r} is not an override: write key=value, as in train.steps=100")
    try:
        return key.strip(), yaml.load(value, _Loader)
    except _NOT_YAML as error:
        raise LrkvError(f"{text[:200]!r}: the value is not YAML; quote it") from error


def _with_kind(name: str, entry: Any) -> dict[str, Any]:
    if "." in str(name):
        raise LrkvError(f"variants.{name}: name it without a dot, which parts the keys of settings")
    entry = {} if entry is None else entry
    if not isinstance(entry, dict):
        raise LrkvError(
            f"variants.{name} = {entry}: write its settings as a mapping, {{}} for none"
        )
    kind = entry.get("kind", name)
    try:
        variant_class(kind)
    except LrkvError as error:
        raise LrkvError(f"variants.{name}: {error}") from error
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
    """A run's length is steps, tokens or epochs: an override of one drops the file's others.

    Raises `LrkvError` for overrides of two.
    """
    lengths = ("steps", "tokens", "epochs")
    named = [one for one in lengths if dict(changes).get(f"train.{one}") is not None]
    if len(named) > 1:
        raise LrkvError(f"train.{named[0]} and train.{named[1]} are both given: give exactly one")
    if named and isinstance(raw.get("train"), dict):
        for other in lengths:
            raw["train"].pop(other, None)


def _validated(path: Path, model: type[Frozen], raw: dict[str, Any], key: str = "") -> Any:
    """`model` with the settings `raw`, which a configuration has under `key`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise LrkvError(f"{path.name}: {first_problem(error, key)}") from error
