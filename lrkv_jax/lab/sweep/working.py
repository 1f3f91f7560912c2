"""Running a sweep's points: each is trained and evaluated in processes of its own.

A point that is done is skipped, one that was begun resumes from its checkpoint, and one that fails
is reported and does not stop the others.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from lrkv_jax.errors import EXIT_START_AGAIN, LrkvError
from lrkv_jax.evaluation.evaluate import ask
from lrkv_jax.lab.sweep.grid import Point
from lrkv_jax.lab.sweep.state import State, state_of

LRKV = (sys.executable, "-m", "lrkv_jax.cli")
_CHILD = (sys.executable, "-SE", str(Path(__file__).with_name("child.py")))


@dataclass(frozen=True)
class PointOutcome:
    """How a point ended; `error` is the last line of its process, None unless it failed."""

    point: Point
    state: State
    seconds: float
    error: str | None = None


class _Processes:
    """The children that run now. A signal to stop this process is passed on: they save and end."""

    def __init__(self):
        self.stopped: int | None = None
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def run(self, command: list[str], log: Path, cores: str) -> int:
        """A command's exit code; 75 if it was never started because of a signal."""
        with self._lock:
            if self.stopped is not None:
                return EXIT_START_AGAIN
            with log.open("ab") as output:
                child = subprocess.Popen(
                    [*_CHILD, cores, *command], stdout=output, stderr=output,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            self._running.add(child)
        if self.stopped is not None:  # the signal came while this one was started
            child.send_signal(signal.SIGTERM)
        try:
            return child.wait()
        finally:
            with self._lock:
                self._running.discard(child)

    def stop(self, number: int, frame: object = None) -> None:
        """The handler of SIGINT and SIGTERM; a second one is passed on and ends them at once."""
        self.stopped = number
        for child in list(self._running):
            child.send_signal(signal.SIGTERM)


def work(
    points: Sequence[Point],
    *,
    tasks: Sequence[str],
    jobs: int = 1,
    logs: Path,
    report: Callable[[PointOutcome], None],
    kept: Path | None = None,
) -> bool:
    """Bring every point to its end, `jobs` at a time; `report` is called for each, even if skipped.

    Jobs that run side by side share this process's cores evenly, each on its own. What a point's
    processes print goes to a file of its name in `logs`. Runs that the file `kept` holds are done,
    and a run that ends is added to it (`lrkv_jax.lab.report.comparison.files`). On SIGINT or
    SIGTERM running points save and end; False is then returned, and the same call resumes them
    later.

    Raises `LrkvError` before anything starts if a directory holds another run, a task is none that
    its runs can be evaluated on, or `jobs` is not from 1 to the number of cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= jobs <= len(cores):
        raise LrkvError(f"--jobs {jobs}: use 1 to {len(cores)}, the cores that there are")
    if "humaneval" in tasks:
        raise LrkvError(
            "--tasks humaneval: a sweep runs no programs that models wrote; ask each run with "
            "lrkv evaluate RUN --tasks humaneval --run-model-code"
        )
    for chats in {point.config.data.mixture is not None: point for point in points}.values():
        ask(chats.config, tasks)
    known = {}
    if kept:
        # Imported here: it loads scipy's statistics, which takes a second.
        from lrkv_jax.lab.report.comparison import keep, kept_by_name, read_run_record

        known = kept_by_name(kept)
    states = {point.name: state_of(point, tasks, known) for point in points}
    logs.mkdir(parents=True, exist_ok=True)
    places: SimpleQueue[str] = SimpleQueue()
    for job in range(jobs):
        places.put(",".join(map(str, cores[job::jobs])) if jobs > 1 else "-")
    processes, writing = _Processes(), threading.Lock()

    def note(outcome: PointOutcome) -> None:
        before, here = known.get(outcome.point.name), outcome.point.directory / "config.yaml"
        is_kept = before is not None and before.evaluation == outcome.state.evaluation
        is_kept |= not here.is_file()  # under another name
        if kept and outcome.state.name == "done" and not is_kept:
            with writing:
                keep([read_run_record(outcome.point.directory)], kept)
        report(outcome)

    def finish(point: Point) -> None:
        if states[point.name].name == "done":
            note(PointOutcome(point, states[point.name], 0.0))
            return
        place = places.get()
        try:
            note(_finish(point, tasks, processes, logs, place))
        finally:
            places.put(place)

    before = {n: signal.signal(n, processes.stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(finish, point) for point in points]:
                done.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return processes.stopped is None


def _finish(point, tasks, processes: _Processes, logs: Path, cores: str) -> PointOutcome:
    began = time.monotonic()
    log = logs / f"{point.name}.log"
    evaluate = [*LRKV, "evaluate", str(point.directory), "--tasks", ",".join(tasks)]
    for command in ([*LRKV, "train", *point.arguments], evaluate):
        code = processes.run(command, log, cores)
        if code:
            break
    seconds = time.monotonic() - began
    error = None
    if code not in (0, EXIT_START_AGAIN) and processes.stopped is None:
        error = f"exit code {code}: {_last_line(log)}"
    return PointOutcome(point, state_of(point, tasks), seconds, error)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
