"""The logs of a run: `metrics.jsonl`, TensorBoard events, Weights & Biases, traces."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from lrkv_jax import files
from lrkv_jax.config.old_names import metrics_of_today
from lrkv_jax.distributed.hardware import hardware_of
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.layers import resolve_dtype
from lrkv_jax.training.setup import Setup

FLUSH_SECONDS = 10.0  # how far behind TensorBoard's curves may be


def memory_peak() -> int:
    """The most bytes that one of this process's devices has held; on a CPU, the process itself."""
    stats = jax.local_devices()[0].memory_stats() or {}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats.get("peak_bytes_in_use", resident)


class Meter:
    """Turns a step's metrics into a row: adds counts, and the wall time since the row before."""

    def __init__(self, setup: Setup):
        self._setup = setup
        one = hardware_of(setup.mesh.devices.flat[0].device_kind)
        in_bfloat16 = resolve_dtype(setup.config.model.dtype) == "bfloat16"  # the table's only peak
        self._peak = one.bf16_flops * setup.mesh.size if one and in_bfloat16 else None
        self.restart()

    def restart(self) -> None:
        """Leave out what happened since the last row."""
        self._last = time.perf_counter()

    def row(self, step: int, metrics: dict[str, Array]) -> dict[str, Any]:
        """The row of a step, which this waits for.

        `host_share` is the part of its time in which the host was not waiting for the devices.
        """
        before = time.perf_counter()
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        seconds, waited = now - self._last, now - before
        self._last = now
        setup, rate = self._setup, self._setup.tokens_per_step / seconds
        return {
            "step": step,
            **{name: value.item() for name, value in jax.device_get(metrics).items()},
            "tokens": setup.tokens_until(step),
            "flops": setup.flops_until(step),
            "tokens_per_second": rate,
            "mfu": rate * setup.flops_per_token / self._peak if self._peak else None,
            "seconds": seconds,
            "host_share": 1 - waited / seconds,
            "memory_bytes": memory_peak(),
        }


class MetricsLog:
    """The rows of a run in `metrics.jsonl`, and their scalars for TensorBoard.

    Opening it for a run that resumes at `start_step` drops the rows past that step and keeps each
    step once, in order. Rows that cannot be written are tried again with the next one; `warn`
    reports that once. `also` gets the same scalars as TensorBoard. A process that
    does not `write` logs nothing. Use as a context manager.
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
        self._path, self._warn = run_dir / "metrics.jsonl", warn
        rows = {row["step"]: row for row in read_metrics(run_dir) if row["step"] <= start_step}
        self._replace([rows[step] for step in sorted(rows)])
        self._unwritten = b""
        self._failing = False
        events = TensorBoard(run_dir / "events", warn, purge_step=start_step + 1)
        self._others: list[TensorBoard | WandB] = [events] if also is None else [events, also]

    def row(self, row: dict[str, Any]) -> None:
        """Append one step's row; its numbers go to TensorBoard too (`scalars_of`)."""
        if not self._writes:
            return
        self._unwritten += json.dumps(files.finite(row)).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._failing:  # once, until all is written
                self._warn(f"{self._path} CANNOT BE WRITTEN ({error.strerror}): training continues")
            self._failing = True
        for other in self._others:
            other.scalars(row["step"], scalars_of(row))

    def complete(self, more: dict[str, Any]) -> None:
        """Add what was measured later to the last row. Raises `OSError` if that cannot be."""
        if self._writes:
            self._write()
            *rows, last = read_metrics(self._path.parent)
            self._file.close()
            self._replace([*rows, last | files.finite(more)])
            for other in self._others:
                other.scalars(last["step"], scalars_of(more))

    def sync(self) -> None:
        """Have every row on the disk when this returns. Raises `OSError` if that cannot be."""
        if self._writes:
            self._write()
            os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_) -> None:
        """Write what can be written. Other rows are made again when the run resumes."""
        if not self._writes:
            return
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()
        for other in self._others:
            other.close()

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file in one move, so that a kill leaves the old one or the new one."""
        files.write(self._path, "".join(f"{json.dumps(row)}\n" for row in rows))
        # Unbuffered: what could not be written is in `_unwritten`.
        self._file = self._path.open("ab", buffering=0)

    def _write(self) -> None:
        while self._unwritten:
            try:
                count = self._file.write(self._unwritten)  # on a full disk, some of it
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            self._unwritten = self._unwritten[count:]
        self._failing = False


class _Optional:
    """A log that training continues without: its first failure is a warning, and ends it."""

    def __init__(self, name: str, warn: Callable[[str], None]):
        self._name, self._warn = name, warn
        self._failed = False

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a disk, a network, a quota, a version: none of it ends a run
            self._failed = True
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._warn(f"{self._name} fails ({why}): training continues without it")


class TensorBoard(_Optional):
    """Scalars in an event file of `directory`; those of other files are void from `purge_step` on.

    They are written in the calling thread: tensorboardX's `SummaryWriter` hands them to a thread,
    and where that dies of a full disk the next scalar waits for ever.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None], *, purge_step: int):
        super().__init__(f"TensorBoard's {directory}", warn)
        self._flushed = time.monotonic()
        with self._tolerant():
            directory.mkdir(parents=True, exist_ok=True)
            # Two starts within a second are two files.
            self._writer = EventsWriter(str(directory / "events"), f".{time.time_ns()}")
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(
                Event(wall_time=time.time(), step=purge_step, session_log=start)
            )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Several scalars of one step."""
        if self._failed:
            return
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        with self._tolerant():
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        if not self._failed:
            with self._tolerant():
                self._writer.close()


def check_wandb() -> None:
    """Raise `LrkvError` where wandb is not installed."""
    try:
        from wandb import init  # noqa: F401  # a folder that it has left is no package
    except ImportError:
        raise LrkvError("logging.wandb=true needs wandb: pip install 'lrkv-jax[wandb]'") from None


class WandB(_Optional):
    """Scalars for Weights & Biases: one W&B run for all starts of a run directory."""

    def __init__(self, setup: Setup, warn: Callable[[str], None]):
        super().__init__("Weights & Biases", warn)
        import wandb

        with self._tolerant():
            folder = setup.directory / "wandb"  # where wandb puts its files
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
            # A run that resumes goes back to its checkpoint, and wandb's step never goes back.
            self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Several scalars of one step."""
        if not self._failed:
            with self._tolerant():
                self._run.log({"step": step, **values})

    def close(self) -> None:
        if not self._failed:
            with self._tolerant():
                self._run.finish()


class Profile(_Optional):
    """A jax.profiler trace of the steps that `train.profile` names, for TensorBoard."""

    def __init__(self, setup: Setup, warn: Callable[[str], None], *, first: int, last: int):
        super().__init__("the profiler", warn)
        steps = setup.config.train.profiled
        self._directory, self._runs = setup.directory / "profile", False
        self._first, self._last = max(first, steps.start), min(last, steps.stop - 1)
        if steps and self._first > self._last:
            warn(
                f"train.profile = {setup.config.train.profile}: this start takes the steps "
                f"{first} to {last}, so nothing is traced"
            )

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


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers by the curve that each is a point of: `train/loss`, `val/loss`, and so on.

    A curve is of one text: `val_*_subset` of the last row, over the batches that were validated on
    before, continues `val/*`; what is over the whole split is `val/final_*`.
    """
    numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and n != "step"}
    subset = {f"val/{n}": numbers.pop(f"val_{n}_subset", None) for n in ("loss", "bpb")}
    last = subset["val/loss"] is not None

    def curve(name: str) -> str:
        if name.startswith("validation_"):
            return f"val/{'final_' * last}{name.removeprefix('validation_')}"
        return f"train/{name}"

    return {curve(name): value for name, value in numbers.items()} | (subset if last else {})


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
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError
            rows.append(metrics_of_today(row))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LrkvError(
                f"{path}:{number} is not a row of metrics: delete that line, or those from it on"
            ) from error
    return rows
