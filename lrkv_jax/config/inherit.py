"""What one configuration takes over: a file that extends another, a run that starts from one."""

from __future__ import annotations

from typing import Any

# Of the training group: what shapes rows and fits the memory, not how long the run is.
_TRAIN = ("context", "loss_chunk", "remat")
_DATA = ("tokenizer", "directory")


def extended(raw: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """A file on top of the one it extends: its settings change single keys, its variants replace.

    An ablation has the model, data and training of its scale, and lines of its own.
    """
    merged = _deep(base, {key: value for key, value in raw.items() if key != "extends"})
    return merged | ({"variants": raw["variants"]} if "variants" in raw else {})


def inherited(raw: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """A file without variants, filled in from the configuration of the run that it starts from.

    The model with its variants, the tokenizer, the context and the optimiser's settings are the
    run's, each key unless the file has it; the rest is the file's. The name joins both.
    """
    model = {key: value for key, value in base["model"].items() if key != "attention"}
    return {
        **raw,
        "name": f"{base['name']}-{raw['name']}" if raw.get("name") else base["name"],
        "attention": base["attention"],
        "variants": base["variants"],
        "model": model | _group(raw, "model"),
        "optimizer": _deep(base.get("optimizer") or {}, _group(raw, "optimizer")),
        "train": _some(base, "train", _TRAIN) | _group(raw, "train"),
        "data": _some(base, "data", _DATA) | _group(raw, "data"),
    }


def _group(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """A group of settings; one that is no mapping is left for validation to name."""
    group = raw.get(name)
    return group if isinstance(group, dict) else {}


def _some(base: dict[str, Any], name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    group = _group(base, name)
    return {key: group[key] for key in keys if key in group}


def _deep(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _deep(merged[key], value) if both else value
    return merged
