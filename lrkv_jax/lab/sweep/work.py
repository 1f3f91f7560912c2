"""Running a sweep's points, one after another, each in separate processes.

A point that is done is skipped, one that was begun resumes from its checkpoint, and one that fails
is reported and does not stop the others.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import differences
from lrkv_jax.distributed import stopping
from lrkv_jax.errors import EXIT_START_AGAIN, LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkSettings
from lrkv_jax.evaluation.evaluate import questions_of
from lrkv_jax.files import check_writable, read_json
from lrkv_jax.lab.report.comparison.files import archive_runs, archived_by_name, read_run_record
from lrkv_jax.lab.report.comparison.runs import RunRecord
from lrkv_jax.lab.sweep.grid import Point
from lrkv_jax.training.run_dir import read_run

LRKV = (sys.executable, "-m", "lrkv_jax.cli")


@dataclass(frozen=True)
class State:
    """`new`; `begun`, at `step` of its steps; `done`, with its evaluation."""

    name: Literal["new", "begun", "done"]
    step: int = 0
    evaluation: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.name == "begun":
            return f"begun, step {self.step}"
        loss = ((self.evaluation or {}).get("bpb") or {}).get("bits_per_byte")
        return self.name if loss is None else f"{self.name}, {loss:.4f} bits per byte"


def state_of(
    point: Point, tasks: Sequence[str], known: Mapping[str, RunRecord] | None = None
) -> State:
    """The state of a point; it is done when its last step has been evaluated on all `tasks`.

    `known` are archived runs by name; one of these settings counts, whatever grid named it. Raises
    `LrkvError` if its directory, or the archived run of its name, is a run with other settings.
    """
    last, known = point.config.train.total_steps, known or {}
    if point.name in known:
        fix = "give it another --archive FILE"
        _check_same(known[point.name].config, point.config, "the archive", fix)
    for run in known.values():
        if _is_same(run.config, point.config) and _is_evaluated(run.evaluation, last, tasks):
            return State("done", last, run.evaluation)
    if not (point.directory / "config.yaml").is_file():
        return State("new")
    fix = "give the sweep another --out FOLDER"
    _check_same(read_run(point.directory), point.config, str(point.directory), fix)
    evaluation = None
    with contextlib.suppress(LrkvError):  # what is garbled is made again
        evaluation = read_json(point.directory / "evaluation.json", "delete it")
    if _is_evaluated(evaluation, last, tasks):
        return State("done", last, evaluation)
    rows = newest_rows(point.directory)
    return State("begun", rows[-1]["step"] if rows else 0)


def _is_same(saved: RunConfig, wanted: RunConfig) -> bool:
    alike = saved.model.attention == wanted.model.attention  # of many runs most differ here
    return alike and saved.train.seed == wanted.train.seed and not differences(saved, wanted)


def _check_same(saved: RunConfig, wanted: RunConfig, where: str, fix: str) -> None:
    changes = differences(saved, wanted)
    if changes:
        raise LrkvError(f"{where} holds another run ({changes[0]}): {fix}")


def _is_evaluated(evaluation: dict[str, Any] | None, last: int, tasks: Sequence[str]) -> bool:
    """Whether the last step was evaluated on these tasks as a sweep does: in the run's precision,
    and by the usual settings of benchmarks."""
    if not evaluation or evaluation.get("step") != last or evaluation.get("changed_settings"):
        return False
    usual = BenchmarkSettings().asked
    found = [evaluation.get(task) for task in tasks]
    return all(one is not None and one.get("settings", usual) == usual for one in found)


@dataclass(frozen=True)
class PointOutcome:
    """The outcome of a point; `error` is the last line of its process, None unless it failed."""

    point: Point
    state: State
    seconds: float = 0.0  # 0 if it was done already
    error: str | None = None

    @property
    def heldout(self) -> tuple[float | None, float | None]:
        """Held-out loss in nats per token and in bits per byte, where it was evaluated so."""
        found = (self.state.evaluation or {}).get("bpb") or {}
        return found.get("cross_entropy"), found.get("bits_per_byte")


class _Child:
    """The process that runs now. A signal to stop this one is passed on: it saves and ends."""

    stopped = False
    process: subprocess.Popen | None = None

    def run(self, command: list[str], log: Path, watch: Callable[[], None]) -> int:
        """A command's exit code; `watch` is called every second until it ends."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        if self.stopped:  # the signal came while this one was started
            self.process.terminate()
        while True:
            try:
                return self.process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                watch()

    def stop(self, number: int, frame: object = None) -> None:
        """The handler of signals that end a run; a second one is passed on and ends it at once."""
        self.stopped = True
        if self.process is not None:
            self.process.terminate()


def newest_rows(directory: Path, size: int = 1 << 14) -> list[dict[str, Any]]:
    """The last rows of a run's metrics, as many as `size` bytes hold; it may be writing them."""
    try:
        with (directory / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1] if line.startswith(b"{")]


def work(
    points: Sequence[Point],
    *,
    tasks: Sequence[str],
    logs: Path,
    report: Callable[[PointOutcome], None],
    watch: Callable[[Point], None] = lambda point: None,
    archive: Path | None = None,
) -> bool:
    """Bring every point to its end; `report` is called for each, first for those that are done.

    `watch` is called every second with the point that runs. What a point's processes print goes to
    a file of its name in `logs`. Runs that the file `archive` has are done, and a run that ends is
    added to it. On SIGINT, SIGTERM or SIGHUP the point that runs saves and ends, and the others
    wait; one whose own process was stopped so waits alone. False is returned then, and the same
    call resumes later.

    Raises `LrkvError` before anything starts if a directory holds another run, or a task is none
    that its runs can be evaluated on.
    """
    if "humaneval" in tasks:
        raise LrkvError(
            "--tasks humaneval: a sweep runs no programs that models wrote; ask each run with "
            "lrkv evaluate RUN --tasks humaneval --run-model-code"
        )
    for chats in {point.config.data.mixture is not None: point for point in points}.values():
        questions_of(chats.config, tasks)
    known: Mapping[str, RunRecord] = {}
    if archive:
        check_writable(archive)
        known = archived_by_name(archive)
    states = [state_of(point, tasks, known) for point in points]
    logs.mkdir(parents=True, exist_ok=True)
    child, saved = _Child(), False
    before = {number: signal.signal(number, child.stop) for number in stopping.caught()}
    try:
        pairs = zip(points, states, strict=True)
        for point, state in sorted(pairs, key=lambda pair: pair[1].name != "done"):
            outcome = PointOutcome(point, state)
            if state.name != "done":
                outcome = _finish(point, tasks, child, logs, watch)
            if archive and _belongs_in(known, outcome):
                archive_runs([read_run_record(point.directory)], archive)
            report(outcome)
            saved |= outcome.error is None and outcome.state.name != "done"
            if child.stopped:
                break
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return not (child.stopped or saved)


def _belongs_in(known: Mapping[str, RunRecord], outcome: PointOutcome) -> bool:
    """Whether a finished run has a directory, and the archive has not its evaluation yet."""
    point, state = outcome.point, outcome.state
    if state.name != "done" or not (point.directory / "config.yaml").is_file():
        return False
    if point.name in known and known[point.name].evaluation == state.evaluation:
        return False
    # The archive may have these settings under another name, and the directory an unfinished run.
    return read_run_record(point.directory).evaluation == state.evaluation


def _finish(
    point: Point,
    tasks: Sequence[str],
    child: _Child,
    logs: Path,
    watch: Callable[[Point], None],
) -> PointOutcome:
    began = time.monotonic()
    log = logs / f"{point.name}.log"
    evaluate = [*LRKV, "evaluate", str(point.directory), "--tasks", ",".join(tasks)]
    for command in ([*LRKV, "train", *point.arguments], evaluate):
        code = child.run(command, log, lambda: watch(point))
        if code or child.stopped:
            break
    error = None
    if code not in (0, EXIT_START_AGAIN) and not child.stopped:
        lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        error = f"exit code {code}: {lines[-1]}"
    return PointOutcome(point, state_of(point, tasks), time.monotonic() - began, error)
