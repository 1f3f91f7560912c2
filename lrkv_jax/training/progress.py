"""A run's present activity: a progress bar or lines, and a watchdog for what hangs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)  # fmt: skip

from lrkv_jax.config.schema import WatchdogConfig
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.distributed.watchdog import Watchdog

# What an activity is called, by its name in the watchdog.
_LABELS = {
    "data": "preparing the data", "restore": "restoring", "init": "making the parameters",
    "compile": "compiling", "validation": "validating", "save": "saving", "sampling": "sampling",
}  # fmt: skip


class ProgressDisplay:
    """A bar on a terminal, plain lines elsewhere; of several `processes`, process 0 shows it.

    `watchdog` has `limits`; what hangs while it is entered is reported and ended, so a build, which
    may take hours, comes before. An output that cannot be written (a full disk, a closed terminal)
    ends no run. Use as a context manager.
    """

    def __init__(self, console: Console, limits: WatchdogConfig, processes: Processes):
        self._console, self._who = console, processes.who()
        self.watchdog = Watchdog(
            limits.warn_after, limits.end_after, warn=self.warn, leave=processes.leave
        )
        self._shows = processes.index == 0
        self._bar: Progress | None = None
        self._file = self._console.file
        self._validation = ""  # the last loss on held-out text

    def __enter__(self) -> ProgressDisplay:
        self._console.file = cast(IO[str], _Tolerant(self._file))
        return self

    def __exit__(self, *_) -> None:
        self._end_bar()
        self._console.file = self._file

    def info(self, text: str, *, style: str | None = None) -> None:
        """One line that stays; a terminal narrower than the line breaks it between words."""
        if self._shows:
            narrow = self._console.is_terminal
            self._console.print(
                text, style=style, highlight=False, markup=False, soft_wrap=not narrow
            )

    def warn(self, text: str) -> None:
        """One line that stays and stands out, from any process and any thread."""
        if self._shows:
            self.info(text, style="bold red")
        else:
            with contextlib.suppress(OSError):
                print(f"lrkv: {self._who}{text}", file=sys.stderr)

    @contextlib.contextmanager
    def doing(self, activity: str, step: int) -> Iterator[None]:
        """A block that may take long: `watchdog` records it, and on a terminal something moves."""
        with self.watchdog.during(activity, step):
            if self._bar is not None:
                before = self._bar.tasks[0].fields["line"]
                self._bar.update(self._task, line=_LABELS[activity])
                yield
                self._bar.update(self._task, line=before)
            elif self._shows and self._console.is_terminal:
                with self._console.status(f"{_LABELS[activity]} ..."):
                    yield
            else:
                yield

    @contextlib.contextmanager
    def steps(self, label: str, start: int, total: int, every: int) -> Iterator[None]:
        """Show the steps from `start` to `total` in this block: a bar, or each `every`-th."""
        self._label, self._start, self._total, self._every = label, start, total, every
        self._began = time.monotonic()
        if self._shows and self._console.is_terminal:
            line = TextColumn("{task.fields[line]}", markup=False)
            left = TimeRemainingColumn(compact=True), TextColumn("left")
            columns = [SpinnerColumn(), MofNCompleteColumn(), line, *left]
            if self._console.width >= 100:
                name = TextColumn("{task.description}", style="bold", markup=False)
                columns[1:1] = [name, BarColumn(bar_width=None)]
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(label, total=total, completed=start, line="first step")
            self._bar.start()
        try:
            yield
        finally:
            self._end_bar()

    def step(self, row: dict[str, Any]) -> None:
        """Show a row of `metrics.jsonl`."""
        if not self._shows:
            return
        speed = row["tokens_per_second"]
        fast = f"{speed / 1e3:,.0f}k tok/s" if speed >= 1e5 else f"{speed:,.0f} tok/s"
        parts = [f"loss {row['loss']:.3f}", fast]
        if row["mfu"] is not None:
            parts.append(f"MFU {row['mfu']:.0%}" if self._bar else f"MFU {row['mfu']:.1%}")
        if row.get("validation_loss") is not None:
            self._validation = f"val {row['validation_loss']:.3f}"
        if self._bar and self._validation:
            parts.append(self._validation)
        if self._bar and row.get("memory_bytes"):
            parts.append(f"{row['memory_bytes'] / 1e9:.3g} GB")
        if row["skipped"]:
            parts.append(f"{row['skipped']} skipped")
        if self._bar:
            self._bar.update(self._task, completed=row["step"], line=" ".join(parts))
        elif row["step"] % self._every == 0 or row["step"] == self._total:
            per_step = (time.monotonic() - self._began) / max(1, row["step"] - self._start)
            left = timedelta(seconds=round(per_step * (self._total - row["step"])))
            parts.insert(1, f"bpb {row['bpb']:.3f}  grad {row['grad_norm']:.2f}")
            line = "  ".join(parts)
            self.info(f"{self._label} step {row['step']}/{self._total}  {line}  left {left}")

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Tolerant:
    """A text stream whose failures end nothing: what it does not take is not shown."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        encoding = self._file.encoding or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            self._file.write(shown)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()
