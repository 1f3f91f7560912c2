"""The training loop: dispatch a step, then report the metrics of the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array
from rich.console import Console

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.compilation import Compiled
from lrkv_jax.distributed.processes import HERE, Processes
from lrkv_jax.distributed.rules import as_argument
from lrkv_jax.distributed.stopping import Stopping, StopRequest
from lrkv_jax.distributed.watchdog import COMPILE
from lrkv_jax.errors import EXIT_UNAVAILABLE, LrkvError
from lrkv_jax.training.callbacks import (
    Callbacks,
    checked_row,
    lacks_validation,
    stop_if_hopeless,
)
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.metrics import Meter, MetricsLog, Profile, WandB, check_wandb, read_metrics
from lrkv_jax.training.progress import ProgressDisplay
from lrkv_jax.training.resume import compiled_step, order_moved, records_skipped, restore_or_init
from lrkv_jax.training.run_dir import RunLock, open_run, record_start
from lrkv_jax.training.setup import Setup, prepare_data, resolve_with_mesh
from lrkv_jax.training.state import TrainState, abstract_state
from lrkv_jax.training.validate import HeldOutLoss


@dataclass(frozen=True)
class TrainResult:
    """A run's directory, last step and last validation, and whether a signal cut it short."""

    run_dir: Path
    step: int
    finished: bool
    validation: HeldOutLoss | None
    stopped: bool


def train(
    config: RunConfig,
    *,
    until: int | None = None,
    stopping: Stopping | None = None,
    console: Console | None = None,
    devices: list[jax.Device] | None = None,
    allow: Collection[str] = (),
    processes: Processes | None = None,
) -> TrainResult:
    """Train the run, from its newest checkpoint if it has one, and checkpoint its end.

    `until` stops, with a checkpoint, after that many steps in all; the schedule stays the whole
    run's. The mesh is made of `devices`, all unless given. While steps are taken, a signal or the
    deadline of `stopping` ends the run after the step, which is saved; returns with `stopped`. A
    second signal ends the process at once. Before the first step a signal ends the process if
    `stopping` is given, and is the caller's otherwise. `allow` names settings, or
    groups of them, that may differ from what the run was trained with, though they change its
    result.

    In a run of several processes (`lrkv_jax.distributed.start` returns `processes`) each makes the
    same call; process 0 builds the data and prints all text.

    Raises `LrkvError`, before anything is written, for a mesh, a model or data that do not fit,
    and for a run directory that holds another run or that another process trains in.
    """
    if not isinstance(config, RunConfig):
        raise LrkvError(f"train of a {type(config).__name__}: give it load_config(NAME, overrides)")
    processes, console = processes or HERE.as_jax_knows(), console or Console(markup=False)
    if config.logging.wandb:
        check_wandb()
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(ProgressDisplay(console, config.watchdog, processes))
        resolved, mesh = resolve_with_mesh(config, devices, processes)
        with progress.doing("data", 0):
            tell = progress.warn if processes.index else progress.info
            setup = prepare_data(resolved, mesh, processes, tell)
        open_run(setup.config, allow, processes)
        stack.enter_context(RunLock(setup.directory, processes))
        stack.enter_context(jax.set_mesh(setup.mesh))
        stack.enter_context(progress.watchdog)
        checkpoints = stack.enter_context(Checkpointer(
            setup.directory / "checkpoints", max_to_keep=setup.config.train.max_checkpoints,
            warn=progress.warn, processes=processes,
        ))  # fmt: skip
        total = setup.config.train.total_steps
        end = total if until is None else min(total, until)
        abstract = abstract_state(setup.config, setup.mesh)
        saved = max(checkpoints.agreed(), default=0)
        with progress.doing("restore" if saved else "init", saved), _fitting("the state", ""):
            state, start, data = restore_or_init(setup, checkpoints, abstract, allow)
        unvalidated = lacks_validation(setup, start)
        if start >= end and not unvalidated:
            epochs = "train.epochs, with --allow-change train.epochs,"
            length = epochs if setup.config.train.epochs else "train.steps"
            more = length if start >= total else "--until"
            progress.info(
                f"{setup.directory}: already at step {start} of {total}; raise {more} to train "
                "longer"
            )
            return TrainResult(setup.directory, start, start >= total, None, False)
        _introduce(setup, start, progress)
        for line in record_start(
            setup.config, start, data, processes, setup.mesh.size, config.model.dtype
        ):
            progress.info(line)
        if start < end:
            with progress.doing(COMPILE, start), _fitting():
                program = compiled_step(setup, abstract)
            progress.info(str(program))
        if start:
            manifest = checkpoints.manifest(start)
            if skipped := records_skipped(setup, manifest):
                progress.warn(
                    "the last batch of the epochs before was filled up: the next epoch begins "
                    f"behind its first {skipped} records"
                )
            if moved := order_moved(setup, manifest):
                progress.warn(moved)
            setup = replace(setup, more_tokens=manifest["tokens"] - setup.tokens_until(start))
            # Checkpoints of before have no count of operations.
            flops = manifest.get("flops", setup.flops_until(start))
            setup = replace(setup, more_flops=flops - setup.flops_until(start))
        stopping = stopping or stack.enter_context(Stopping(processes=processes))
        stop_requested = stack.enter_context(stopping.hold(progress.warn))
        writes = processes.index == 0
        also = WandB(setup, progress.warn) if setup.config.logging.wandb and writes else None
        log = stack.enter_context(MetricsLog(
            setup.directory, start_step=start, warn=progress.warn, also=also, writes=writes
        ))  # fmt: skip
        stack.enter_context(
            progress.steps(setup.config.attention, start, end, setup.config.train.log_every)
        )

        callbacks = Callbacks(setup, checkpoints, log, progress, stop_requested)
        step, stopped = start, False
        if unvalidated:
            callbacks.complete(state, step)
        if start < end and not callbacks.stopped:
            profile = Profile(setup, progress.warn, first=start + 1, last=end)
            stack.callback(profile.close)
            loop = _Loop(setup, program, log, progress, profile, callbacks)
            state, step, stopped = loop.run(state, start, end, stop_requested)
            # Under `hold`: a signal that comes twice must not end what the first one saves.
            with progress.doing("save", step):
                checkpoints.wait()
            _check_saved(setup, checkpoints, step, stopped, progress)
            if step == total:
                callbacks.complete(state, step)
    stopped = stopped or callbacks.stopped
    finished = step >= total and not stopped
    return TrainResult(setup.directory, step, finished, callbacks.last_validation, stopped)


def _introduce(setup: Setup, start: int, progress: ProgressDisplay) -> None:
    sizes = ", ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items())
    model, hosts = setup.config.model, setup.processes.count
    progress.info(
        f"{setup.directory}: {model.attention.kind}, {setup.config.train.total_steps} steps of "
        f"{setup.tokens_per_step:,} tokens, mesh {sizes}, {model.dtype} on "
        f"{setup.mesh.devices.flat[0].device_kind}" + (f", {hosts} processes" if hosts > 1 else "")
    )
    if not start and model.attention.warning:
        progress.info(model.attention.warning)
    if start:
        progress.info(f"resuming from step {start}")
    elif read_metrics(setup.directory):
        progress.info("no step was saved before: starting again from step 0")


@contextlib.contextmanager
def _fitting(
    what: str = "a step",
    less: str = "raise train.grad_accum_steps, set train.remat=full, or ",
    first: bool = True,
) -> Iterator[None]:
    """Raise `LrkvError` where a device lacks memory; later than at first no setting is wrong."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not first or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise LrkvError(
            f"{what} does not fit into a device's memory: {less}use more devices; `lrkv plan` "
            "shows what fits"
        ) from error


def _check_saved(
    setup: Setup, checkpoints: Checkpointer, step: int, stopped: bool, progress: ProgressDisplay
) -> None:
    saved = max(checkpoints.agreed(), default=0)
    if saved == step:
        if stopped:
            progress.info(f"stopped at step {step}, saved: the same command resumes from there")
        return
    lost = f"step {step} could not be saved: the same command resumes from step {saved}"
    with setup.processes.together():  # all have failed: process 0 reports it
        text = f"{lost}, once {setup.directory} has space and can be written"
        raise LrkvError(text, EXIT_UNAVAILABLE)


class _Loop:
    """Takes the steps; the row of each goes to the log and the display while the next one runs."""

    def __init__(
        self,
        setup: Setup,
        program: Compiled,
        log: MetricsLog,
        progress: ProgressDisplay,
        profile: Profile,
        callbacks: Callbacks,
    ):
        self._setup, self._program, self._callbacks = setup, program, callbacks
        self._log, self._progress, self._profile = log, progress, profile
        self._meter = Meter(setup)
        # In the first row alone.
        self._more = {"compile_seconds": program.seconds, "compile_cached": program.cached}

    def run(
        self, state: TrainState, start: int, end: int, stop_requested: StopRequest
    ) -> tuple[TrainState, int, bool]:
        """Run steps start + 1 to end; return state and step, and whether a signal stopped it."""
        setup, callbacks, watchdog = self._setup, self._callbacks, self._progress.watchdog
        pending, step, stopped = None, start, False
        watchdog.at("data", step + 1)
        for tokens_bU in setup.loader.iterate(start, end):
            watchdog.at("step", step + 1)
            self._profile.before(step + 1)
            size = setup.config.train.global_batch_size
            batch = as_argument(setup.batch_sharding, size, tokens_bU)
            with _fitting(first=bool(self._more)):
                state, metrics = self._program.call(state, batch)
            step += 1
            if pending:
                # The device is already busy with the next step while we wait for this one.
                self._report(self._row(*pending))
            pending = (step, metrics)
            if callbacks.comes_after(step, end):
                row = self._row(step, metrics)
                row |= callbacks.validate(state, step)
                # Before the save: the log must have all steps that a checkpoint has.
                self._report(row)
                callbacks.save_and_sample(state, step)
                pending = None
                self._meter.restart()
            stopped = callbacks.stopped or (stop_requested.here() and step < end)
            if stopped:
                break
            watchdog.at("data", step + 1)
        if pending:
            self._report(self._row(*pending))
        if step > start:
            callbacks.save(state, step)
        return state, step, stopped

    def _row(self, step: int, metrics: dict[str, Array]) -> dict[str, Any]:
        """The row of a step, which this waits for."""
        with _fitting(first=bool(self._more)):  # what failed on a device is raised here
            row = self._meter.row(step, metrics) | self._more
        if failures := self._callbacks.checkpoints.failures:
            row["failed_saves"] = failures
        self._profile.after(step)
        self._more = {}
        return row

    def _report(self, row: dict[str, Any]) -> None:
        """Log and show a row; raises `LrkvError` where the guard has skipped too many steps."""
        row = checked_row(self._setup, self._progress, row)
        self._log.row(row)
        self._progress.step(row)
        stop_if_hopeless(self._setup, row)
