"""The training loop: dispatch a step, then look at the metrics of the one before."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from lrkv_jax.accounting import training_flops_per_token
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data.loader import Loader, heldout_batches, make_loader
from lrkv_jax.decode import Sampling, generate
from lrkv_jax.errors import LrkvError
from lrkv_jax.optim import learning_rates
from lrkv_jax.sharding import batch_sharding, check_mesh, make_mesh
from lrkv_jax.train.metrics import Clock, MetricsLog, peak_flops
from lrkv_jax.train.progress import TrainProgress
from lrkv_jax.train.run_dir import open_run, resolve
from lrkv_jax.train.state import (
    TrainState,
    abstract_state,
    checkpoint_items,
    from_checkpoint_items,
    init_state,
)
from lrkv_jax.train.step import make_train_step
from lrkv_jax.train.validate import HeldOut, make_validation

SAMPLING = Sampling(temperature=0.8, top_p=0.95)


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
) -> TrainResult:
    """Train the run, from its newest checkpoint if it has one, and checkpoint its end.

    `until` stops, with a checkpoint, after that many steps in all; the schedule stays the whole
    run's. The mesh is made of `devices`, all unless given. SIGINT and SIGTERM finish the step,
    save and return with `finished` False.

    Raises `LrkvError`, before anything is written, for a mesh, a model or data that do not fit,
    and for a run directory of another run.
    """
    config = resolve(config)
    console = console or Console()
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh)
    learning_rates(config.optimizer, config.train.total_steps)  # refuses a schedule that cannot be
    loader = make_loader(
        config.data,
        config.train.context,
        config.train.batch,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    _check_vocabulary(config, loader)
    run_dir = open_run(config)
    with (
        jax.set_mesh(mesh),
        Checkpointer(run_dir / "checkpoints", keep=config.train.keep) as checkpoints,
    ):
        return _Run(config, mesh, loader, run_dir, checkpoints, console).go(until)


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

    def __init__(self, config, mesh, loader, run_dir, checkpoints, console):
        self.config, self.mesh, self.loader = config, mesh, loader
        self.run_dir, self.checkpoints, self.console = run_dir, checkpoints, console
        train = config.train
        token_bytes_V = loader.tokenizer.token_bytes_up_to(config.model.vocabulary)
        self.train_step = make_train_step(config, mesh, token_bytes_V)
        self.validation = make_validation(config.model, mesh, token_bytes_V, chunk=train.loss_chunk)
        self.tokens_per_step = train.batch * train.context
        self.flops_per_token = training_flops_per_token(config.model, train.context)
        self.peak = peak_flops(list(mesh.devices.flat))
        self.last_validation: HeldOut | None = None
        self.validation_losses: dict[int, float] = {}
        self.stop_signal: int | None = None

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
        state = self._state(progress, start)
        log = MetricsLog(self.run_dir, start_step=start)
        restore_handlers = self._catch_signals()
        try:
            step = self._steps(state, start, end, log, progress)
        finally:
            restore_handlers()
            log.close()
            progress.close()
            self.checkpoints.wait()
        if self.stop_signal is not None:
            progress.say(f"stopped at step {step}, saved: the same command goes on from there")
        finished = step >= train.total_steps
        return TrainResult(self.run_dir, step, finished, self.last_validation, self.stop_signal)

    def _state(self, progress: TrainProgress, start: int) -> TrainState:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        model = self.config.model
        progress.say(
            f"{self.run_dir}: {model.attention.kind}, {self.config.train.total_steps} steps of "
            f"{self.tokens_per_step:,} tokens, mesh {sizes}, {model.dtype} on "
            f"{self.mesh.devices.flat[0].device_kind}"
        )
        if not start:
            return init_state(self.config, self.mesh)
        progress.say(f"resuming from step {start}")
        abstract = abstract_state(self.config, self.mesh)
        items = self.checkpoints.restore(checkpoint_items(abstract), start)
        return from_checkpoint_items(abstract, items)

    def _steps(self, state, start, end, log, progress) -> int:
        """Run steps start + 1 to end; return the last one done."""
        pending, step = None, start
        clock = Clock()
        rows = batch_sharding(self.mesh)
        for batch_BU in self.loader.iterate(start, end):
            tokens_BU = jax.make_array_from_process_local_data(rows, batch_BU)
            state, metrics = self.train_step(state, tokens_BU)
            step += 1
            if pending:
                # The device is already busy with the next step while we wait for this one.
                self._report(*pending, clock, log, progress)
            pending = (step, metrics)
            if self._pauses_after(step, end):
                row = self._row(step, metrics, clock)
                log.row(row | self._pause(state, step, end, progress), events=True)
                progress.step(row)
                pending = None
                clock.restart()
            if self.stop_signal is not None:
                break
        if pending:
            self._report(*pending, clock, log, progress)
        if step > start:
            self._save(state, step)
        return step

    def _report(self, step, metrics, clock, log, progress) -> None:
        row = self._row(step, metrics, clock)
        log.row(row, events=step % self.config.train.log_every == 0)
        progress.step(row)

    def _row(self, step: int, metrics: dict[str, jax.Array], clock: Clock) -> dict[str, Any]:
        """One row of metrics.jsonl. Waits for the step's metrics."""
        seconds, outside = clock.lap(lambda: jax.block_until_ready(metrics))
        rate = self.tokens_per_step / seconds
        tokens = step * self.tokens_per_step
        return {
            "step": step,
            **{name: float(value) for name, value in metrics.items()},
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "tokens_per_second": rate,
            "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
            "seconds": seconds,
            "outside_step": outside / seconds,
        }

    # What happens between steps.

    def _pauses_after(self, step: int, end: int) -> bool:
        train = self.config.train
        every = (train.validate_every, train.save_every, train.sample_every)
        return step == end or any(n and step % n == 0 for n in every)

    def _pause(self, state: TrainState, step: int, end: int, progress) -> dict[str, float]:
        """Validate, save and sample where it is time; returns what the row should carry."""
        train, extra = self.config.train, {}

        def due(every: int) -> bool:
            return step == train.total_steps or bool(every and step % every == 0)

        if due(train.validate_every):
            batches = heldout_batches(self.config.data, train.context, train.batch)
            if step < train.total_steps:
                batches = islice(batches, train.validation_batches)
            self.last_validation = result = self.validation(state.params, batches)
            self.validation_losses = {step: result.cross_entropy}
            extra = {
                "validation_loss": result.cross_entropy,
                "validation_bpb": result.bits_per_byte,
                "validation_tokens": result.tokens,
            }
            progress.say(
                f"{self.config.attention}  step {step}  held out: "
                f"CE {result.cross_entropy:.4f}  {result.bits_per_byte:.4f} bits per byte"
            )
        if due(train.save_every):
            self._save(state, step)
        if due(train.sample_every) and train.sample_tokens:
            self._sample(state, step, progress)
        return extra

    def _save(self, state: TrainState, step: int) -> None:
        manifest = {
            "config": self.config.model_dump(mode="json"),
            "tokens": step * self.tokens_per_step,
            "loader": {"step": step, "next_batch": self.loader.hash_at(step)},
        }
        loss = self.validation_losses.get(step)
        self.checkpoints.save(step, checkpoint_items(state), manifest, loss)

    def _sample(self, state: TrainState, step: int, progress: TrainProgress) -> None:
        """Write text from each prompt to samples/, and show the first."""
        tokenizer, train = self.loader.tokenizer, self.config.train
        prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in train.sample_prompts]
        seed = int(jax.random.bits(jax.random.fold_in(state.rng, step)) >> 1)
        continued = generate(
            self.config.model,
            state.params,
            prompts,
            train.sample_tokens,
            sampling=SAMPLING,
            seed=seed,
            stop=(tokenizer.bos,),
        )
        texts = [
            prompt + tokenizer.decode(ids)
            for prompt, ids in zip(train.sample_prompts, continued, strict=True)
        ]
        if jax.process_index() == 0:
            folder = self.run_dir / "samples"
            folder.mkdir(exist_ok=True)
            (folder / f"step-{step:08d}.txt").write_text("\n\n".join(texts) + "\n")

    # Signals.

    def _catch_signals(self):
        """Note SIGINT and SIGTERM for the loop; returns what undoes that."""

        def note(number, frame):
            self.stop_signal = number

        try:
            old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the caller's signals are its own
            return lambda: None
        return lambda: [signal.signal(s, handler) for s, handler in old.items()]
