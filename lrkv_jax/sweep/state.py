"""How far a run of a sweep is, from its directory alone; no device is touched."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lrkv_jax.config.differences import differences
from lrkv_jax.disk import read_json
from lrkv_jax.errors import LrkvError
from lrkv_jax.run.metrics import read_metrics
from lrkv_jax.run.run_dir import read_run
from lrkv_jax.sweep.grid import Point


@dataclass(frozen=True)
class State:
    """`new`; `begun`, at `step` of its steps; `done`, with its evaluation."""

    name: Literal["new", "begun", "done"]
    step: int = 0
    evaluation: dict[str, Any] | None = None


def state_of(point: Point, tasks: Sequence[str]) -> State:
    """How far a point is; it is done when its last step has been evaluated on all `tasks`.

    Raises `LrkvError` where its directory holds a run with other settings.
    """
    if not (point.directory / "config.yaml").is_file():
        return State("new")
    saved = read_run(point.directory)
    changes = differences(saved, point.config)
    if changes:
        raise LrkvError(
            f"{point.directory} holds another run ({changes[0]}): "
            "give the sweep its own --out FOLDER"
        )
    evaluation = {}
    with contextlib.suppress(LrkvError):  # what is garbled is made again
        evaluation = read_json(point.directory / "evaluation.json", "delete it") or {}
    last = saved.train.total_steps
    if evaluation.get("step") == last and all(task in evaluation for task in tasks):
        return State("done", last, evaluation)
    rows = read_metrics(point.directory)
    return State("begun", rows[-1]["step"] if rows else 0)
