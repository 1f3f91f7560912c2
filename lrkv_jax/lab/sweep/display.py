"""A sweep's display: the progress of each run, and at the end their results."""

import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lrkv_jax.lab.report.comparison.runs import RunRecord
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.lab.sweep.grid import Point
from lrkv_jax.lab.sweep.work import PointOutcome, newest_rows
from lrkv_jax.training.metrics import read_metrics

PLAIN_SECONDS = 60.0  # between two lines where nothing can be redrawn


class Display:
    """A live table of all runs on a terminal, elsewhere a line a minute; a context manager."""

    def __init__(self, points: Sequence[Point], console: Console):
        self.outcomes: dict[str, PointOutcome] = {}
        self._points, self._console = points, console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._running: Point | None = None
        self._rows: list[dict[str, Any]] = []  # its newest ones
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        self._live.stop()

    def report(self, outcome: PointOutcome) -> None:
        """Show how a run ended."""
        self.outcomes[outcome.point.name] = outcome
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)
            return
        took = f" in {_time(outcome.seconds)}" if outcome.seconds else ", as it was"
        self._print(f"{outcome.point.name}  {outcome.error or outcome.state}{took}", 0)

    def watch(self, point: Point) -> None:
        """Show how far the run is that trains now."""
        self._running, self._rows = point, newest_rows(point.directory)
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)
        elif self._rows and time.monotonic() > self._printed + PLAIN_SECONDS:
            self._printed = time.monotonic()
            name, state, step, loss, left = self._cells(point)
            self._print(f"{name}  {state}, step {step}, loss {loss}, left {left}", 1)

    def print_results(self) -> None:
        """Print a table of the finished runs, the lowest loss first, and why others failed."""
        done = [one for one in self.outcomes.values() if one.state.name == "done"]
        done.sort(key=lambda one: (one.heldout[0] is None, one.heldout[0], one.point.directory))
        rows = []
        for one in done:
            place, config = one.point.directory, one.point.config
            run = RunRecord(place, config, tuple(read_metrics(place)), None, None)
            speed = run.tokens_per_second
            steps, loss, bits = f"{config.train.total_steps:,}", *map(_number, one.heldout)
            rows.append((str(place), loss, bits, steps, f"{speed:,.0f}" if speed else ""))
        headers = ("run", "loss", "bits/byte", "steps", "tokens/s")
        if rows:
            print(tabulated(headers, rows, form="simple"))
            print(f"next    lrkv report {shlex.quote(str(self._points[0].directory.parent))}")
        for one in self.outcomes.values():
            if one.error:
                print(f"failed: {one.point.name}: {one.error}")

    def _print(self, text: str, ahead: int) -> None:
        count = len(self.outcomes) + ahead
        self._console.print(f"{count:3d}/{len(self._points)}  {text}", soft_wrap=True)

    def _table(self) -> Table:
        """A table of as many runs as fit on the terminal, with the one that trains."""
        room = max(3, self._console.height - 6)
        at = self._points.index(self._running) if self._running else 0
        first = max(0, min(at - room // 2, len(self._points) - room))
        ended = f"{len(self.outcomes)} of {len(self._points)} runs have ended"
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=ended, caption_justify="left")
        table.add_column("run", overflow="fold")
        for name in ("state", "step", "loss", "left"):
            table.add_column(name, justify="right")
        for point in self._points[first : first + room]:
            table.add_row(*self._cells(point))
        return table

    def _cells(self, point: Point) -> tuple[str, str, str, str, str]:
        """A run's name, state, step, loss and time left, at the speed of the one that trains."""
        total = point.config.train.total_steps
        if one := self.outcomes.get(point.name):
            ended = "failed" if one.error else one.state.name
            return point.name, ended, f"{one.state.step:,}/{total:,}", _number(one.heldout[0]), ""
        state, step, loss = "waiting", 0, None
        if point == self._running:
            state = "starting"
            if self._rows:
                step, loss = self._rows[-1]["step"], self._rows[-1].get("loss")
                state = "training" if step < total else "evaluating"
        paces = [row["seconds"] for row in self._rows if "seconds" in row]
        left = _time((total - step) * sum(paces) / len(paces)) if paces else ""
        return point.name, state, f"{step:,}/{total:,}", _number(loss), left


def _number(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
