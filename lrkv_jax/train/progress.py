"""How a run looks while it runs: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lrkv_jax.runtime import processes


class TrainProgress:
    """Shows steps of one run. Only process 0 shows anything."""

    def __init__(self, label: str, start: int, total: int, *, every: int, console: Console):
        self._console, self._every, self._total = console, every, total
        self._shows = processes.index() == 0
        self._label, self._began, self._start = label, time.monotonic(), start
        self._bar = None
        if self._shows and console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
            self._task = self._bar.add_task(label, total=total, completed=start, line="compiling")
            self._bar.start()

    def say(self, text: str, *, style: str | None = None) -> None:
        """One line that stays."""
        if self._shows:
            console = self._bar.console if self._bar else self._console
            console.print(text, highlight=False, soft_wrap=True, style=style)

    def warn(self, text: str) -> None:
        """One line that stays and stands out."""
        self.say(text, style="bold red")

    def step(self, row: dict[str, Any]) -> None:
        """Show a row of `metrics.jsonl`."""
        if not self._shows:
            return
        parts = [f"loss {row['loss']:.3f}", f"{row['tokens_per_second']:,.0f} tok/s"]
        if row["mfu"] is not None:
            parts.append(f"MFU {row['mfu']:.1%}")
        if row["skipped"]:
            parts.append(f"{row['skipped']} skipped")
        if self._bar:
            self._bar.update(self._task, completed=row["step"], line="  ".join(parts))
        elif row["step"] % self._every == 0 or row["step"] == self._total:
            per_step = (time.monotonic() - self._began) / max(1, row["step"] - self._start)
            left = time.strftime("%H:%M:%S", time.gmtime(per_step * (self._total - row["step"])))
            parts.insert(1, f"bpb {row['bpb']:.3f}  grad {row['grad_norm']:.2f}")
            line = "  ".join(parts)
            self.say(f"{self._label}  step {row['step']}/{self._total}  {line}  left {left}")

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
