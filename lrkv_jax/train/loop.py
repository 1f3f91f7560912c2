"""The training loop: dispatch a step, then look at the metrics of the one before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from lrkv_jax.accounting import training_flops_per_token
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data.builder import build_dataset
from lrkv_jax.data.loader import Loader, make_loader
from lrkv_jax.errors import LrkvError
from lrkv_jax.optim import learning_rates
from lrkv_jax.runtime import processes
from lrkv_jax.runtime.batches import as_argument, local_rows
from lrkv_jax.runtime.compilation import Compiled, Compiling
from lrkv_jax.runtime.startup import Startup
from lrkv_jax.runtime.stopping import Stopping
from lrkv_jax.sharding import batch_sharding, check_mesh, make_mesh
from lrkv_jax.train.foresight.fit import check_memory, memory_limit
from lrkv_jax.train.metrics import Clock, MetricsLog, peak_flops
from lrkv_jax.train.pauses import Pauses
from lrkv_jax.train.progress import TrainProgress
from lrkv_jax.train.run_dir import open_run, resolve
from lrkv_jax.train.state import (
    TrainState,
    abstract_state,
    checkpoint_items,
    from_checkpoint_items,
    init_state,
)
from lrkv_jax.train.step import StepMetrics, make_train_step, over_leaves
from lrkv_jax.train.validate import HeldOut


@dataclass(frozen=True)
class TrainResult:
    """Where the run is, how far it got, its last validation, and the signal that stopped it."""

    run_dir: Path
    step: int
    finished: bool
    validation: HeldOut | None
    signal: int | None


def train(
    config: RunConfig,
    *,
    until: int | None = None,
    console: Console | None = None,
    devices: list[jax.Device] | None = None,
    startup: Startup | None = None,
) -> TrainResult:
    """Train the run, from its newest checkpoint if it has one, and checkpoint its end.

    `until` stops, with a checkpoint, after that many steps in all; the schedule stays the whole
    run's. The mesh is made of `devices`, all unless given. SIGINT and SIGTERM finish the step,
    save and return with `finished` False. `startup` has the time before this call, if any.

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
        # Refuses a schedule that cannot be.
        learning_rates(config.optimizer, config.train.total_steps)
        rows = local_rows(batch_sharding(mesh), config.train.batch)
        limit = memory_limit(mesh)
        tight = limit and check_memory(config, mesh, limit)
    startup.phase("devices")
    if tight and processes.index() == 0:
        console.print(tight, highlight=False, soft_wrap=True)
    with processes.together():
        if processes.index() == 0:
            build_dataset(config.data, config.train.context)
    with processes.together():
        loader = make_loader(config.data, config.train.context, config.train.batch, rows=rows)
        _check_vocabulary(config, loader)
    startup.phase("data")
    run_dir = open_run(config)
    with (
        jax.set_mesh(mesh),
        Checkpointer(run_dir / "checkpoints", keep=config.train.keep) as checkpoints,
    ):
        return _Run(config, mesh, loader, run_dir, checkpoints, console, startup).go(until)


def _check_vocabulary(config: RunConfig, loader: Loader) -> None:
    """Raise `LrkvError` if the tokenizer makes ids that the model does not have."""
    have, need = config.model.vocabulary, loader.tokenizer.vocabulary
    if have < need:
        raise LrkvError(
            f"model.vocabulary = {have} is smaller than tokenizer {config.data.tokenizer}'s "
            f"{need}: set model.vocabulary={need}"
        )


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
        self.stopped = False

    def go(self, until: int | None) -> TrainResult:
        train = self.config.train
        end = min(train.total_steps, until or train.total_steps)
        start = self.checkpoints.latest() or 0
        progress = TrainProgress(
            self.config.attention, start, end, every=train.log_every, console=self.console
        )
        if start >= end:
            progress.say(f"{self.run_dir}: step {start} is done already; more needs train.steps")
            return TrainResult(self.run_dir, start, start >= train.total_steps, None, None)
        abstract = abstract_state(self.config, self.mesh)
        with self._compiling(abstract) as compiling:
            state = self._state(abstract, start, progress)
            self.startup.phase("state")
            self.compiled = compiling.result()
        self.startup.phase("compile")
        progress.say(str(self.compiled))
        pauses = Pauses(
            self.config, self.mesh, self.loader, self.run_dir, self.checkpoints, progress
        )
        log = MetricsLog(self.run_dir, start_step=start)
        try:
            with Stopping(start) as stopping:
                step = self._steps(state, start, end, pauses, stopping, log, progress)
        finally:
            log.close()
            progress.close()
            self.checkpoints.wait()
        if self.stopped:
            progress.say(f"stopped at step {step}, saved: the same command goes on from there")
        return TrainResult(
            self.run_dir,
            step,
            step >= train.total_steps,
            pauses.last_validation,
            stopping.signal if self.stopped else None,
        )

    def _compiling(self, abstract: TrainState) -> Compiling:
        """The step, on its way to being compiled for the state and a batch."""
        train, vocabulary = self.config.train, self.config.model.vocabulary
        token_bytes_V = self.loader.tokenizer.token_bytes_up_to(vocabulary)
        step = make_train_step(self.config, self.mesh, token_bytes_V)
        tokens = jax.ShapeDtypeStruct(
            (train.batch, train.context + 1), jnp.int32, sharding=batch_sharding(self.mesh)
        )
        leaves = jax.tree.leaves(abstract)
        return Compiling(over_leaves(step, abstract, self.mesh), leaves, tokens, mesh=self.mesh)

    def _state(self, abstract: TrainState, start: int, progress: TrainProgress) -> TrainState:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        model, hosts = self.config.model, processes.count()
        progress.say(
            f"{self.run_dir}: {model.attention.kind}, {self.config.train.total_steps} steps of "
            f"{self.tokens_per_step:,} tokens, mesh {sizes}, {model.dtype} on "
            f"{self.mesh.devices.flat[0].device_kind}"
            + (f", {hosts} processes" if hosts > 1 else "")
        )
        if not start:
            return init_state(self.config, self.mesh)
        progress.say(f"resuming from step {start}")
        items = self.checkpoints.restore(checkpoint_items(abstract), start)
        return from_checkpoint_items(abstract, items)

    def _steps(self, state, start, end, pauses, stopping, log, progress) -> int:
        """Run steps start + 1 to end; return the last one done."""
        pending, step = None, start
        leaves, tree = jax.tree.flatten(state)
        del state  # each step consumes the leaves of the one before
        clock = Clock()
        rows, batch = batch_sharding(self.mesh), self.config.train.batch
        run_step = self.compiled.call
        for tokens_bU in self.loader.iterate(start, end):
            leaves, metrics = run_step(leaves, as_argument(rows, batch, tokens_bU))
            step += 1
            if pending:
                # The device is already busy with the next step while we wait for this one.
                self._report(*pending, clock, log, progress)
            pending = (step, metrics)
            if pauses.comes_after(step, end):
                row = self._row(step, metrics, clock, progress)
                log.row(row | pauses.pause(jax.tree.unflatten(tree, leaves), step), events=True)
                progress.step(row)
                pending = None
                clock.restart()
            if stopping.after(step):
                self.stopped = True
                break
        if pending:
            self._report(*pending, clock, log, progress)
        if step > start:
            pauses.save(jax.tree.unflatten(tree, leaves), step)
        return step

    def _report(self, step, metrics, clock, log, progress) -> None:
        row = self._row(step, metrics, clock, progress)
        log.row(row, events=step % self.config.train.log_every == 0)
        progress.step(row)

    def _row(self, step: int, metrics: StepMetrics, clock, progress) -> dict[str, Any]:
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
        if self.startup is not None:
            self.startup.phase("step")
            progress.say(str(self.startup))
            row |= self.startup.row() | {
                "compile_seconds": self.compiled.seconds,
                "compile_cached": self.compiled.cached,
            }
            self.startup = None
        return row
