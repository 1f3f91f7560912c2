"""How far a run of a sweep is, from its files alone; no device is touched."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import differences
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import read_json
from lrkv_jax.lab.sweep.grid import Point
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.run_dir import read_run

if TYPE_CHECKING:
    from lrkv_jax.lab.report.comparison import RunRecord


@dataclass(frozen=True)
class State:
    """`new`; `begun`, at `step` of its steps; `done`, with its evaluation."""

    name: Literal["new", "begun", "done"]
    step: int = 0
    evaluation: dict[str, Any] | None = None


def state_of(
    point: Point, tasks: Sequence[str], kept: "Mapping[str, RunRecord] | None" = None
) -> State:
    """How far a point is; it is done when its last step has been evaluated on all `tasks`.

    `kept` are finished runs by name that have no directory here
    (`lrkv_jax.lab.report.comparison.files`); one of these settings counts, whatever grid named it.
    Raises `LrkvError` where its directory, or the kept run of its name, is a run with other
    settings.
    """
    last = point.config.train.total_steps
    if kept and point.name in kept:
        mend = "give it its own --keep FILE"
        _check_same(kept[point.name].config, point.config, "the file of kept runs", mend)
    for run in (kept or {}).values():
        if _is_same(run.config, point.config) and _is_evaluated(run.evaluation, last, tasks):
            return State("done", last, run.evaluation)
    if not (point.directory / "config.yaml").is_file():
        return State("new")
    mend = "give the sweep its own --out FOLDER"
    _check_same(read_run(point.directory), point.config, str(point.directory), mend)
    evaluation = None
    with contextlib.suppress(LrkvError):  # what is garbled is made again
        evaluation = read_json(point.directory / "evaluation.json", "delete it")
    if _is_evaluated(evaluation, last, tasks):
        return State("done", last, evaluation)
    rows = read_metrics(point.directory)
    return State("begun", rows[-1]["step"] if rows else 0)


def _is_same(saved: RunConfig, asked: RunConfig) -> bool:
    alike = saved.model.attention == asked.model.attention  # of many runs most differ here
    return alike and saved.train.seed == asked.train.seed and not differences(saved, asked)


def _check_same(saved: RunConfig, asked: RunConfig, where: str, mend: str) -> None:
    changes = differences(saved, asked)
    if changes:
        raise LrkvError(f"{where} holds another run ({changes[0]}): {mend}")


def _is_evaluated(evaluation: dict[str, Any] | None, last: int, tasks: Sequence[str]) -> bool:
    return bool(evaluation) and evaluation.get("step") == last and {*tasks} <= evaluation.keys()
