"""What a run writes about itself: `metrics.jsonl`, TensorBoard events, Weights & Biases, traces."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from lrkv_jax import files
from lrkv_jax.distributed.hardware import hardware_of
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.training.setup import Setup
from lrkv_jax.training.step import StepMetrics


def peak_flops(devices: list[jax.Device]) -> float | None:
    """The dense bfloat16 peak of all devices together, FLOP/s, or None where it is not known."""
    one = hardware_of(devices[0].device_kind)
    return one.bf16_flops * len(devices) if one else None


class Meter:
    """Turns a step's metrics into a row: adds counts, and the wall time since the row before."""

    def __init__(self, setup: Setup):
        train = setup.config.train
        self._tokens = setup.tokens_per_step
        self._flops = training_flops_per_token(setup.config.model, train.context)
        self._peak = peak_flops(list(setup.mesh.devices.flat))
        self.restart()

    def restart(self) -> None:
        """Leave out what happened since the last row."""
        self._last = time.perf_counter()

    def row(self, step: int, metrics: StepMetrics) -> dict[str, Any]:
        """The row of a step, which this waits for; `outside_step` is the share not waited."""
        before = time.perf_counter()
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        seconds, waited = now - self._last, now - before
        self._last = now
        rate, tokens = self._tokens / seconds, step * self._tokens
        return {
            "step": step,
            **metrics.floats(),
            "tokens": tokens,
            "flops": tokens * self._flops,
            "tokens_per_second": rate,
            "mfu": rate * self._flops / self._peak if self._peak else None,
            "seconds": seconds,
            "outside_step": 1 - waited / seconds,
        }


class MetricsLog:
    """Appends rows to `metrics.jsonl` and scalars to TensorBoard; nothing unless it `writes`.

    Opening it for a run that resumes at `start_step` drops the rows past that step and keeps each
    step once, in order. Rows that the disk does not take are kept and tried again with the next
    one; `warn` says when that begins. `also` takes the same scalars
    as TensorBoard. Use as a context manager.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_step: int,
        warn: Callable[[str], None],
        also: WandB | None = None,
        writes: bool = True,
    ):
        self._writes = writes
        if not writes:
            return
        self._path, self._warn, self._also = run_dir / "metrics.jsonl", warn, also
        kept = {row["step"]: row for row in read_metrics(run_dir) if row["step"] <= start_step}
        # Replaced in one move, so that a kill leaves the old file or the new one.
        files.write(self._path, "".join(f"{json.dumps(kept[step])}\n" for step in sorted(kept)))
        # Unbuffered: what is not written is known, and is in `_unwritten`.
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""
        self._failing: set[str] = set()
        self._events = Events(run_dir / "events", purge_step=start_step + 1)

    def row(self, row: dict[str, Any]) -> None:
        """Append one step's row; its numbers go to TensorBoard too (`scalars_of`)."""
        if not self._writes:
            return
        self._unwritten += json.dumps(_strict(row)).encode() + b"\n"
        scalars = scalars_of(row)
        for write in (self._write, partial(self._events.scalars, row["step"], scalars)):
            try:
                write()
            except OSError as error:
                name = error.filename or str(self._path)
                if name not in self._failing:  # of each file once, until all is written
                    self._warn(f"{name} CANNOT BE WRITTEN ({error.strerror}): training continues")
                self._failing.add(name)
        if self._also is not None:
            self._also.scalars(row["step"], scalars)

    def sync(self) -> None:
        """Have every row on the disk when this returns. Raises `OSError` if that cannot be."""
        if self._writes:
            self._write()
            os.fsync(self._file.fileno())
            self._failing.clear()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_) -> None:
        """Write what can be written. Other rows are made again when the run resumes."""
        if not self._writes:
            return
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()
        self._events.close()
        if self._also is not None:
            self._also.close()

    def _write(self) -> None:
        while self._unwritten:
            try:
                written = self._file.write(self._unwritten)  # on a full disk, some of it
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            self._unwritten = self._unwritten[written:]


def check_wandb() -> None:
    """Raise `LrkvError` where wandb is not installed."""
    try:
        from wandb import init  # noqa: F401  # a folder that it has left is no package
    except ImportError:
        raise LrkvError("logging.wandb=true needs wandb: pip install 'lrkv-jax[wandb]'") from None


class WandB:
    """The same scalars for Weights & Biases: one run of it for all starts of a run directory.

    What fails is said by `warn`, once, and training continues without it.
    """

    def __init__(self, setup: Setup, warn: Callable[[str], None]):
        import wandb

        self._warn, self._run = warn, None
        with self._tolerant():
            folder = setup.directory / "wandb"  # where wandb puts its own files
            folder.mkdir(exist_ok=True)
            name = folder / "lrkv-id"
            if not name.is_file():
                files.write(name, secrets.token_hex(4))
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "lrkv"),
                name=os.environ.get("WANDB_NAME", setup.directory.name),
                id=name.read_text(),
                resume="allow",
                dir=str(setup.directory),
                config=setup.config.model_dump(mode="json"),
            )
            # A run that resumes goes back to its checkpoint, and wandb's own step never goes back.
            self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Several scalars of one step."""
        if self._run is not None:
            with self._tolerant():
                self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            with self._tolerant():
                self._run.finish()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a network, a quota, a version: none of it ends a run
            self._run = None
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._warn(f"Weights & Biases fails ({why}): training continues without it")


class Profile:
    """A jax.profiler trace of the steps that `train.profile` names, for TensorBoard's profile tab.

    What fails is said by `warn`; the run does not depend on it.
    """

    def __init__(self, setup: Setup, warn: Callable[[str], None], *, first: int, last: int):
        wanted, self._warn = setup.config.train.profiled, warn
        self._directory, self._runs = setup.directory / "profile", False
        self._first, self._last = max(first, wanted.start), min(last, wanted.stop - 1)
        if wanted and self._first > self._last:
            warn(f"train.profile = {setup.config.train.profile}: this start takes the steps "
                 f"{first} to {last}, so nothing is traced")  # fmt: skip

    def before(self, step: int) -> None:
        """Start the trace if this is its first step."""
        if step == self._first <= self._last:
            with self._tolerant():
                jax.profiler.start_trace(self._directory)
                self._runs = True

    def after(self, step: int) -> None:
        """End the trace if its last step is done; the devices may be busy with the next one."""
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Write what was traced so far."""
        if self._runs:
            self._runs = False
            with self._tolerant():
                jax.profiler.stop_trace()
                self._warn(f"traced: tensorboard --logdir {self._directory} shows it")

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._runs = False
            self._warn(f"{self._directory} gets no trace ({error}): training continues")


class Events:
    """Scalars for TensorBoard: one file in `directory`; from `purge_step` on, older ones are void.

    They are written in the calling thread. tensorboardX's own writer hands them to a thread through
    a short queue; when that thread dies of a full disk, the queue fills and the next scalar waits
    for ever, and the run with it. Its message formats and checksum are used, its threads are not.
    Raises `OSError` where the disk takes nothing; a torn record ends the file for its readers, so
    the writer stays closed after that.
    """

    def __init__(self, directory: Path, *, purge_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        stamp = time.time_ns()  # two starts within a second are two files
        name = f"events.out.tfevents.{stamp // 10**9}.{stamp % 10**9:09d}.{socket.gethostname()}"
        self._file = (directory / name).open("ab", buffering=0)
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Several scalars of one step."""
        if self._file.closed:
            return
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        data = event.SerializeToString()
        header = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (header, data))
        record = header + next(sums) + data + next(sums)
        try:
            whole = self._file.write(record) == len(record)
        except OSError:
            self._file.close()
            raise
        if not whole:
            self._file.close()
            raise OSError(28, "No space left on device", self._file.name)


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers by the curve that each is a point of.

    A curve is of one text: the last row's losses of the batches that were validated on before
    (`sampled_*`) continue `validation_*`, and those of the whole split are `final_validation_*`.
    """
    numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and n != "step"}
    if "sampled_loss" not in numbers:
        return numbers
    curves = {}
    for name, value in numbers.items():
        if name.startswith("validation_"):
            name = f"final_{name}"
        elif name.startswith("sampled_"):
            name = f"validation_{name.removeprefix('sampled_')}"
        curves[name] = value
    return curves


def _strict(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for what JSON has no number for; not every reader takes NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; a last one torn by a kill is left out.

    Raises `LrkvError` for a line that is not a row.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        return []
    data = path.read_bytes()
    rows = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(json.loads(line))
            if type(rows[-1]["step"]) is not int:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LrkvError(
                f"{path}:{number} is not a row of metrics: delete that line, or those from it on"
            ) from error
    return rows
