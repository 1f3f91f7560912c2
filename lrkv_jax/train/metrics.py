"""What a run writes about itself: `metrics.jsonl`, one row a step, and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from lrkv_jax.hardware import hardware_of
from lrkv_jax.runtime import processes


def peak_flops(devices: list[jax.Device]) -> float | None:
    """The dense bfloat16 peak of all devices together, FLOP/s, or None where it is not known."""
    one = hardware_of(devices[0].device_kind)
    return one.bf16_flops * len(devices) if one else None


class Clock:
    """Splits the loop's wall time into waiting for the device and everything else."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def lap(self, wait: Callable[[], Any]) -> tuple[float, float]:
        """Run `wait`; return seconds since the last lap, and those not spent waiting."""
        before = time.perf_counter()
        wait()
        now = time.perf_counter()
        whole, waited = now - self._last, now - before
        self._last = now
        return whole, whole - waited


class MetricsLog:
    """Appends rows to `metrics.jsonl` and scalars to TensorBoard; only process 0 writes.

    Opening it for a run that resumes at `start_step` drops the rows past that step, so that each
    step stands once, in order.
    """

    def __init__(self, run_dir: Path, *, start_step: int):
        self._writes = processes.index() == 0
        if not self._writes:
            return
        path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= start_step]
        # Replaced in one move, so that a kill leaves the old file or the new one.
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(f"{line}\n" for line in kept))
        fresh.replace(path)
        self._file = path.open("a", buffering=1)
        self._events = SummaryWriter(str(run_dir / "events"), purge_step=start_step + 1)

    def row(self, row: dict[str, Any], *, events: bool) -> None:
        """Append one step's row; with `events`, its numbers go to TensorBoard too."""
        if not self._writes:
            return
        self._file.write(json.dumps(_strict(row)) + "\n")
        if events:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._events.add_scalar(name, value, row["step"])

    def sync(self) -> None:
        """Have every row on the disk when this returns."""
        if self._writes:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._writes:
            self._file.close()
            self._events.close()


def _strict(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for what JSON has no number for; not every reader takes NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _lines(path: Path) -> list[str]:
    """The file's whole rows; a last one torn by a kill is left out."""
    if not path.is_file():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in _lines(Path(run_dir) / "metrics.jsonl")]
