"""The training loop: dispatch a step, then look at the metrics of the one before."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from lrkv_jax.accounting import training_flops_per_token
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data.loader import Loader
from lrkv_jax.errors import LrkvError
from lrkv_jax.optim import learning_rates
from lrkv_jax.runtime import processes
from lrkv_jax.runtime.batches import as_argument, local_rows
from lrkv_jax.runtime.compilation import Compiled
from lrkv_jax.runtime.startup import Startup
from lrkv_jax.runtime.stopping import Stopping
from lrkv_jax.runtime.watchdog import COMPILE, Watchdog
from lrkv_jax.sharding import batch_sharding, check_mesh, make_mesh
from lrkv_jax.train.foresight.fit import check_memory, memory_limit
from lrkv_jax.train.incidents import Incidents
from lrkv_jax.train.metrics import Clock, MetricsLog, peak_flops, read_metrics
from lrkv_jax.train.pauses import Pauses
from lrkv_jax.train.progress import TrainProgress
from lrkv_jax.train.records import loader_of, with_records
from lrkv_jax.train.resume import compiling, resumed
from lrkv_jax.train.run_dir import open_run, resolve
from lrkv_jax.train.state import TrainState, abstract_state
from lrkv_jax.train.step import StepMetrics
from lrkv_jax.train.validate import HeldOut


@dataclass(frozen=True)
class TrainResult:
    """Where the run is, how far it got, its last validation, and whether it was told to stop."""

    run_dir: Path
    step: int
    finished: bool
    validation: HeldOut | None
    stopped: bool


def train(
    config: RunConfig,
    *,
    until: int | None = None,
    deadline: float | None = None,
    console: Console | None = None,
    devices: list[jax.Device] | None = None,
    startup: Startup | None = None,
) -> TrainResult:
    """Train the run, from its newest checkpoint if it has one, and checkpoint its end.

    `until` stops, with a checkpoint, after that many steps in all; the schedule stays the whole
    run's. The mesh is made of `devices`, all unless given. SIGINT, SIGTERM and the `deadline`, of
    `time.monotonic`, finish the step, save and return with `stopped`; a second signal ends the
    process at once. `startup` has the time before this call, if any.

    In a run of several processes (`lrkv_jax.runtime.start`) each makes the same call; process 0
    builds the data, and all text is written by it.

    Raises `LrkvError`, before anything is written, for a mesh, a model or data that do not fit,
    for a step that its devices' memory cannot hold, and for a run directory of another run.
    """
    console = console or Console()
    startup = startup or Startup()
    with processes.together():
        config = resolve(config)
        mesh = make_mesh(config.mesh, devices)
        check_mesh(config, mesh)
    if config.train.epochs is not None:
        config = with_records(config)  # which are counted before anything is made of them
    with processes.together():
        # Refuses a schedule that cannot be.
        learning_rates(config.optimizer, config.train.total_steps)
        rows = local_rows(batch_sharding(mesh), config.train.batch)
        limit = memory_limit(mesh)
        tight = limit and check_memory(config, mesh, limit)
    startup.phase("devices")
    if tight and processes.index() == 0:
        console.print(tight, highlight=False, soft_wrap=True)
    config = with_records(config)
    with processes.together():
        loader = loader_of(config, rows)
    startup.phase("data")
    run_dir = open_run(config)

    def say(text: str) -> None:
        console.print(text, style="bold red", highlight=False, soft_wrap=True)

    with (
        jax.set_mesh(mesh),
        Checkpointer(run_dir / "checkpoints", keep=config.train.keep, say=say) as checkpoints,
    ):
        run = _Run(config, mesh, loader, run_dir, checkpoints, console, startup)
        return run.go(until, deadline)


class _Run:
    """One process's part in a run, from its first step or its newest checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        loader: Loader,
        run_dir: Path,
        checkpoints: Checkpointer,
        console: Console,
        startup: Startup,
    ):
        self.config, self.mesh, self.loader = config, mesh, loader
        self.run_dir, self.checkpoints, self.startup = run_dir, checkpoints, startup
        self.console = console
        train = config.train
        self.tokens_per_step = train.batch * train.context
        self.flops_per_token = training_flops_per_token(config.model, train.context)
        self.peak = peak_flops(list(mesh.devices.flat))
        self.compiled: Compiled | None = None
        limits = config.watchdog
        self.watchdog = Watchdog(limits.warn_after, limits.end_after, say=self.warn)

    def go(self, until: int | None, deadline: float | None) -> TrainResult:
        """Train to the end, or until `until` or `deadline`; leaves with every save settled."""
        total = self.config.train.total_steps
        end = min(total, until or total)
        with self.watchdog:
            state, start = self._prepare(end)
            if start >= end:
                self.say(f"{self.run_dir}: step {start} is done already; more needs train.steps")
                return TrainResult(self.run_dir, start, start >= total, None, False)
            self._progress = progress = TrainProgress(
                self.config.attention, start, end,
                every=self.config.train.log_every, console=self.console,
            )  # fmt: skip
            self._incidents = Incidents(self.config.guard, self.loader, self.run_dir, progress)
            self._log = MetricsLog(self.run_dir, start_step=start, warn=progress.warn)
            self._pauses = Pauses(self.config, self.mesh, self.loader, self.run_dir,
                                  self.checkpoints, progress, self.watchdog)  # fmt: skip
            try:
                with Stopping(start, deadline=deadline) as stopping:
                    step, stopped = self._steps(state, start, end, stopping)
                    # A signal that comes twice must not end what the first one saves.
                    self.watchdog.at("save", step)
                    self.checkpoints.wait()
            finally:
                self._log.close()
                progress.close()
        self._check_saved(step, stopped)
        return TrainResult(self.run_dir, step, step >= total, self._pauses.last_validation, stopped)

    def _prepare(self, end: int) -> tuple[TrainState, int]:
        """The state to go on from and its step; meanwhile the step's program is compiled."""
        abstract = abstract_state(self.config, self.mesh)
        built = self.config, self.mesh, self.loader, abstract
        with contextlib.ExitStack() as threads:
            # A run that seems done is not compiled for, unless its last checkpoint is damaged.
            done = (self.checkpoints.latest() or 0) >= end
            program = None if done else threads.enter_context(compiling(*built))
            self.watchdog.at("restore", end if done else 0)
            state, start = resumed(
                self.config, self.mesh, self.checkpoints, abstract, set_aside=True
            )
            if start < end:
                self._introduce(start)
                self.startup.phase("state")
                self.watchdog.at(COMPILE, start)
                program = program or threads.enter_context(compiling(*built))
                self.compiled = program.result()
                self.startup.phase("compile")
                self.say(str(self.compiled))
        return state, start

    def say(self, text: str) -> None:
        """One line before there is progress to show."""
        if processes.index() == 0:
            self.console.print(text, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """One line that stands out, from any process and any thread."""
        who = "" if processes.index() == 0 else f"{processes.name(processes.index())}: "
        self.console.print(f"{who}{text}", style="bold red", highlight=False, soft_wrap=True)

    def _check_saved(self, step: int, stopped: bool) -> None:
        saved = int(processes.exchange(str(self.checkpoints.latest() or 0))[0])
        if saved == step:
            if stopped:
                self.say(f"stopped at step {step}, saved: the same command goes on from there")
            return
        lost = f"step {step} could not be saved: the same command goes on from step {saved}"
        if stopped:
            self.say(lost)
            return
        with processes.together():  # it is so in all: process 0 says it
            raise LrkvError(f"{lost}, once {self.run_dir} has space and can be written")

    def _introduce(self, start: int) -> None:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        model, hosts = self.config.model, processes.count()
        self.say(
            f"{self.run_dir}: {model.attention.kind}, {self.config.train.total_steps} steps of "
            f"{self.tokens_per_step:,} tokens, mesh {sizes}, {model.dtype} on "
            f"{self.mesh.devices.flat[0].device_kind}"
            + (f", {hosts} processes" if hosts > 1 else "")
        )
        if start:
            self.say(f"resuming from step {start}")
        elif read_metrics(self.run_dir):
            self.say("no step was saved before: starting again from step 0")

    def _steps(self, state: TrainState, start: int, end: int, stopping) -> tuple[int, bool]:
        """Run steps start + 1 to end; return the last one done, and whether it was told to stop."""
        pending, step, stopped = None, start, False
        leaves, tree = jax.tree.flatten(state)
        del state  # each step consumes the leaves of the one before
        clock, watchdog, pauses = Clock(), self.watchdog, self._pauses
        rows, batch = batch_sharding(self.mesh), self.config.train.batch
        run_step = self.compiled.call
        watchdog.at("data", step + 1)
        for tokens_bU in self.loader.iterate(start, end):
            watchdog.at("step", step + 1)
            leaves, metrics = run_step(leaves, as_argument(rows, batch, tokens_bU))
            step += 1
            if pending:
                # The device is already busy with the next step while we wait for this one.
                self._report(*pending, clock)
            pending = (step, metrics)
            if pauses.comes_after(step, end):
                row = self._row(step, metrics, clock)
                state = jax.tree.unflatten(tree, leaves)
                row |= pauses.validate(state, step)
                # Before the save: what a checkpoint has behind it must stand in the log.
                self._tell(row, events=True)
                pauses.save_and_sample(state, step, self._log)
                del state
                pending = None
                clock.restart()
            if stopping.after(step):
                stopped = True
                break
            watchdog.at("data", step + 1)
        if pending:
            self._report(*pending, clock)
        if step > start:
            pauses.save(jax.tree.unflatten(tree, leaves), step, self._log)
        return step, stopped

    def _report(self, step: int, metrics: StepMetrics, clock: Clock) -> None:
        row = self._row(step, metrics, clock)
        self._tell(row, events=step % self.config.train.log_every == 0)

    def _tell(self, row: dict[str, Any], *, events: bool) -> None:
        row = self._incidents.look(row)
        self._log.row(row, events=events)
        self._progress.step(row)
        self._incidents.stop_if_hopeless(row)

    def _row(self, step: int, metrics: StepMetrics, clock: Clock) -> dict[str, Any]:
        """One row of metrics.jsonl; the first says how the start went. Waits for the metrics."""
        seconds, outside = clock.lap(lambda: jax.block_until_ready(metrics))
        rate = self.tokens_per_step / seconds
        tokens = step * self.tokens_per_step
        row = {
            "step": step,
            **metrics.floats(),
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "tokens_per_second": rate,
            "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
            "seconds": seconds,
            "outside_step": outside / seconds,
        }
        if self.checkpoints.failures:
            row["failed_saves"] = self.checkpoints.failures
        if self.startup is not None:
            self.startup.phase("step")
            self._progress.say(str(self.startup))
            row |= self.startup.row() | {
                "compile_seconds": self.compiled.seconds,
                "compile_cached": self.compiled.cached,
            }
            self.startup = None
        return row
