"""What a run writes about itself: `metrics.jsonl`, one row a step, and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lrkv_jax.errors import LrkvError
from lrkv_jax.hardware import hardware_of
from lrkv_jax.runtime import processes
from lrkv_jax.train.events import Events


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
    step stands once, in order. Rows that the disk does not take are kept and tried again with the
    next one; `warn` is told when that begins.
    """

    def __init__(self, run_dir: Path, *, start_step: int, warn: Callable[[str], None]):
        self._writes = processes.index() == 0
        if not self._writes:
            return
        self._path, self._warn = run_dir / "metrics.jsonl", warn
        kept = [row for row in read_metrics(run_dir) if row["step"] <= start_step]
        # Replaced in one move, so that a kill leaves the old file or the new one.
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
        fresh.replace(self._path)
        # Unbuffered: what is not written is known, and is in `_unwritten`.
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""
        self._failing = False
        self._events = Events(run_dir / "events", purge_step=start_step + 1)

    def row(self, row: dict[str, Any], *, events: bool) -> None:
        """Append one step's row; with `events`, its numbers go to TensorBoard too."""
        if not self._writes:
            return
        self._unwritten += json.dumps(_strict(row)).encode() + b"\n"
        numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and n != "step"}
        try:
            self._write()
            if events:
                self._events.scalars(row["step"], numbers)
        except OSError as error:
            if not self._failing:
                name = error.filename or self._path
                self._warn(f"{name} CANNOT BE WRITTEN ({error.strerror}): training goes on")
            self._failing = True

    def sync(self) -> None:
        """Have every row on the disk when this returns. Raises `OSError` if that cannot be."""
        if self._writes:
            self._write()
            os.fsync(self._file.fileno())
            self._failing = False

    def close(self) -> None:
        """Write what can be written. Rows that cannot are made again when the run goes on."""
        if not self._writes:
            return
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()
        self._events.close()

    def _write(self) -> None:
        while self._unwritten:
            try:
                written = self._file.write(self._unwritten)  # on a full disk, some of it
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            self._unwritten = self._unwritten[written:]


def _strict(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for what JSON has no number for; not every reader takes NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; a last one torn by a kill is left out.

    Raises `LrkvError` for a row that is none.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        return []
    data = path.read_bytes()
    rows = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["step"] + 0
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LrkvError(
                f"{path}:{number} is not a row of metrics: delete that line, or those from it on"
            ) from error
    return rows
