"""How far a run of a sweep is, from its directory alone; no device is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lrkv_jax.config import RunConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.sweep.grid import Point
from lrkv_jax.train.metrics import read_metrics
from lrkv_jax.train.run_dir import NOT_LEARNT, RHYTHM, read_run


@dataclass(frozen=True)
class State:
    """`new`; `begun`, at `step` of its steps; `done`, with what its evaluation said."""

    name: Literal["new", "begun", "done"]
    step: int = 0
    evaluation: dict[str, Any] | None = None


def state_of(point: Point, tasks: Sequence[str]) -> State:
    """How far a point is; it is done when its last step has been evaluated on all `tasks`.

    Raises `LrkvError` where its directory holds a run with other settings.
    """
    if not (point.directory / "config.yaml").is_file():
        return State("new")
    change = _change(read_run(point.directory), point.config)
    if change:
        raise LrkvError(
            f"{point.directory} holds another run ({change}): give the sweep its own --out FOLDER"
        )
    report = point.directory / "evaluation.json"
    if report.is_file():
        evaluation = json.loads(report.read_text())
        last = point.config.train.total_steps
        if evaluation["step"] == last and all(task in evaluation for task in tasks):
            return State("done", last, evaluation)
    rows = read_metrics(point.directory)
    return State("begun", rows[-1]["step"] if rows else 0)


def _change(before: RunConfig, now: RunConfig) -> str | None:
    """The first setting whose change makes another result, as "key: old there, new asked for"."""
    for group in ("model", "optimizer", "data", "train"):
        old, new = (getattr(run, group).model_dump() for run in (before, now))
        for key in new:
            ignored = key in NOT_LEARNT or (group == "train" and key in RHYTHM)
            if not ignored and not _same(old.get(key), new[key]):
                return f"{group}.{key}: {old.get(key)} there, {new[key]} asked for"
    return None


def _same(old: Any, new: Any) -> bool:
    """Equal, where what was `auto` has been resolved on the machine that ran it."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in new)
    return new == "auto" or old == new
