"""Callbacks between steps: validation, checkpoints, samples, and a look at the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from lrkv_jax import files
from lrkv_jax.config.schema import TrainConfig
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.loader import heldout_batches
from lrkv_jax.distributed.stopping import StopRequest
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine
from lrkv_jax.inference.trained_run import SAMPLING
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.metrics import MetricsLog, read_metrics
from lrkv_jax.training.progress import ProgressDisplay
from lrkv_jax.training.resume import data_fingerprints
from lrkv_jax.training.run_dir import unusable
from lrkv_jax.training.setup import Setup, sample_prompts
from lrkv_jax.training.state import TrainState, checkpoint_items
from lrkv_jax.training.validate import HeldOutLoss, make_validation


class Callbacks:
    """The callbacks after some steps; every process runs them, process 0 writes.

    `stopped` is whether a validation was left because all processes stop.
    """

    def __init__(
        self,
        setup: Setup,
        checkpoints: Checkpointer,
        log: MetricsLog,
        progress: ProgressDisplay,
        stop_requested: StopRequest,
    ):
        self._setup, self.config, self.checkpoints = setup, setup.config, checkpoints
        self._log, self._progress, self._stop_requested = log, progress, stop_requested
        self.stopped, self._writes = False, setup.processes.index == 0
        self._validate = make_validation(
            self.config.model, setup.mesh, setup.token_bytes_V,
            chunk=self.config.train.loss_chunk, batch_format=setup.batch_format,
        )  # fmt: skip
        self.last_validation: HeldOutLoss | None = None
        self._losses: dict[int, float] = {}  # of the last validation, by its step

    def comes_after(self, step: int, end: int) -> bool:
        """Whether the loop pauses after a step."""
        train = self.config.train
        every = (train.validate_every, train.save_every, train.sample_every)
        return step == end or any(_due(train, n, step) for n in every)

    def validate(self, state: TrainState, step: int) -> dict[str, float]:
        """Validate where it is time; returns what the step's row should carry.

        It is empty after the last step, which is saved before `complete` takes its time, and where
        a stop was requested meanwhile.
        """
        train = self.config.train
        if step == train.total_steps or not _due(train, train.validate_every, step):
            return {}
        return self._measured(state, step)

    def complete(self, state: TrainState, step: int) -> None:
        """Validate a step that is saved and logged, and add what is measured to both.

        Both stay as they are where a stop was requested meanwhile; the next start does it again.
        """
        more = self._measured(state, step)
        if self.stopped:
            self._progress.info("the validation was stopped: the same command starts it again")
            return
        with self._setup.processes.together():
            try:
                if self._writes:
                    self.checkpoints.validated(step, self._losses[step])
                    self._log.complete(more)
            except OSError as error:
                raise unusable(self._setup.directory, error) from error

    def _measured(self, state: TrainState, step: int) -> dict[str, float]:
        """`validation_*`, over `train.validation_batches` batches that are the same each time.

        After the last step it is over the whole split, and `val_*_subset` has the same batches as
        before: those can be compared from step to step.
        """
        some, row = self.config.train.validation_batches, {}
        with self._progress.doing("validation", step):
            found = subset = self._held_out(state, step, some)
            if step == self.config.train.total_steps and some is not None and not self.stopped:
                row = {
                    "val_loss_subset": subset.cross_entropy,
                    "val_bpb_subset": subset.bits_per_byte,
                }
                found = self._held_out(state, step, None)
        if self.stopped:
            return {}
        # The best step is found among losses of the same batches.
        self._losses = {step: subset.cross_entropy}
        self.last_validation = found
        return row | {
            "validation_loss": found.cross_entropy,
            "validation_bpb": found.bits_per_byte,
            "validation_tokens": found.tokens,
        }

    def _held_out(self, state: TrainState, step: int, some: int | None) -> HeldOutLoss:
        """The loss on some batches, or on the whole split; of fewer batches if `stopped`."""
        train = self.config.train
        batches = heldout_batches(
            self.config.data, train.seq_len, train.global_batch_size,
            some=some, folder=self._setup.records,
        )  # fmt: skip
        found = self._validate(state.params, self._until_stopped(batches, step))
        if not self.stopped:
            what = "whole split" if some is None else f"{some} batches"
            self._progress.info(
                f"{self.config.attention} step {step}  held out, {what}: CE "
                f"{found.cross_entropy:.4f}  {found.bits_per_byte:.4f} bits per byte"
            )
        return found

    def _until_stopped(self, batches: Iterable[np.ndarray], step: int) -> Iterator[np.ndarray]:
        for tokens_BU in batches:
            self.stopped = self._stop_requested.here()
            if self.stopped:
                return
            # Each by itself: all of them may rightly take longer than one activity may.
            self._progress.watchdog.at("validation", step)
            yield tokens_BU

    def save_and_sample(self, state: TrainState, step: int) -> None:
        """Save and sample where it is time; the step's row must be in the log already."""
        train = self.config.train
        if _due(train, train.save_every, step):
            self.save(state, step)
        if _due(train, train.sample_every, step) and train.sample_tokens and train.sample_prompts:
            with self._progress.doing("sampling", step):
                self._sample(state, step)

    def save(self, state: TrainState, step: int) -> None:
        """Start a checkpoint of a step, unless it has one."""
        about = {
            "config": self.config.model_dump(mode="json"),
            "tokens": self._setup.tokens_until(step),
            "flops": self._setup.flops_until(step),
            "loader": {"step": step} | data_fingerprints(self._setup.loader, step),
        }
        loss = self._losses.get(step)
        with self._progress.doing("save", step):
            self.checkpoints.save(step, checkpoint_items(state), about, loss, first=self._log.sync)

    def _sample(self, state: TrainState, step: int) -> None:
        """Write text from each prompt to samples/."""
        tokenizer, train = self._setup.loader.tokenizer, self.config.train
        prompts, stop, between = sample_prompts(self.config, tokenizer), tokenizer.eos_token_ids, ""
        if self.config.data.mixture is not None:
            stop, between = ChatFormat(tokenizer).stop_token_ids, "\n"
        seed = int(jax.random.bits(jax.random.fold_in(state.rng, step)) >> 1)
        length = max(map(len, prompts)) + train.sample_tokens
        engine = Engine(self.config.model, state.params, batch=len(prompts), length=length)
        continued = engine.generate(
            prompts, train.sample_tokens, sampling=SAMPLING, seed=seed, stop=stop
        )
        texts = [
            prompt + between + tokenizer.decode(ids)
            for prompt, ids in zip(train.sample_prompts, continued, strict=True)
        ]
        if self._writes:
            path = self._setup.directory / "samples" / f"step-{step:08d}.txt"
            try:
                path.parent.mkdir(exist_ok=True)
                files.write(path, "\n\n".join(texts) + "\n")
            except OSError as error:  # training continues on a full disk
                self._progress.warn(f"{path} cannot be written ({error.strerror})")


def lacks_validation(setup: Setup, step: int) -> bool:
    """Whether a saved step still has to be validated, by the rows that process 0 sees."""
    train = setup.config.train
    there = ["validation_loss" in r for r in read_metrics(setup.directory) if r["step"] == step]
    return setup.processes.exchange(_due(train, train.validate_every, step) and there == [False])[0]


def _due(train: TrainConfig, every: int, step: int) -> bool:
    return step == train.total_steps or bool(every and step % every == 0)


def checked_row(setup: Setup, progress: ProgressDisplay, row: dict[str, Any]) -> dict[str, Any]:
    """A step's row for the log: `spike` and `skipped_in_a_row` only where there is one.

    Warns of both.
    """
    row = row | {"batch": f"{row['batch']:08x}"}
    in_a_row, height, limit = row.pop("in_a_row"), row.pop("spike"), setup.config.guard.spike
    spike = limit is not None and height > limit
    if spike:
        row["spike"] = height
    if in_a_row:
        row["skipped_in_a_row"] = in_a_row
        records = setup.loader.records_of(row["step"] - 1)
        shown = ", ".join(map(str, records[:8])) + (", ..." if len(records) > 8 else "")
        finite = math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
        what = f"a spike of {height:.0f} deviations" if finite else "not finite"
        progress.warn(
            f"STEP {row['step']} SKIPPED, {what}: loss {row['loss']:.4g}, gradient norm "
            f"{row['grad_norm']:.4g}, batch {row['batch']} of records {shown}; "
            f"{row['skipped']} skipped so far"
        )
    elif spike:
        progress.warn(
            f"step {row['step']}: loss {row['loss']:.4g} is {height:.0f} deviations above the "
            f"last ones, gradient norm {row['grad_norm']:.3g}, batch {row['batch']}: taken "
            "(guard.skip_spikes=true leaves such steps out)"
        )
    return row


def stop_if_hopeless(setup: Setup, row: dict[str, Any]) -> None:
    """Raise `LrkvError` after `guard.stop_after` skipped steps in a row."""
    if row.get("skipped_in_a_row", 0) >= setup.config.guard.stop_after:
        with setup.processes.together():  # all stop here: process 0 reports it
            raise LrkvError(
                f"{row['skipped_in_a_row']} steps in a row were skipped, up to step "
                f"{row['step']}: resume from the last checkpoint with a higher guard.stop_after, "
                "or with lower learning rates and --allow-change optimizer"
            )
