"""What happens between steps: validation, checkpoints, samples."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import jax
from jax.sharding import Mesh

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.loader import Loader, heldout_batches
from lrkv_jax.decode import Sampling, generate
from lrkv_jax.runtime import processes
from lrkv_jax.runtime.watchdog import Watchdog
from lrkv_jax.train.metrics import MetricsLog
from lrkv_jax.train.progress import TrainProgress
from lrkv_jax.train.rows import RowFormat
from lrkv_jax.train.state import TrainState, checkpoint_items
from lrkv_jax.train.validate import HeldOut, make_validation

SAMPLING = Sampling(temperature=0.8, top_p=0.95)


class Pauses:
    """Stops of the loop after some steps; every process makes them, process 0 writes."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        loader: Loader,
        run_dir: Path,
        checkpoints: Checkpointer,
        progress: TrainProgress,
        watchdog: Watchdog,
    ):
        self._watchdog = watchdog
        self.config, self.loader, self.run_dir = config, loader, run_dir
        self.checkpoints, self.progress = checkpoints, progress
        token_bytes_V = loader.tokenizer.token_bytes_up_to(config.model.vocabulary)
        self._validate = make_validation(
            config.model, mesh, token_bytes_V,
            chunk=config.train.loss_chunk, rows=RowFormat.of(config, loader.tokenizer.bos),
        )  # fmt: skip
        self.last_validation: HeldOut | None = None
        self._losses: dict[int, float] = {}  # of the last validation, by its step

    def comes_after(self, step: int, end: int) -> bool:
        """Whether the loop pauses after a step."""
        train = self.config.train
        every = (train.validate_every, train.save_every, train.sample_every)
        return step == end or any(n and step % n == 0 for n in every)

    def validate(self, state: TrainState, step: int) -> dict[str, float]:
        """Measure where it is time; returns what the step's row should carry."""
        if not self._due(self.config.train.validate_every, step):
            return {}
        with self._watchdog.during("validation", step):
            return self._measure(state, step)

    def save_and_sample(self, state: TrainState, step: int, log: MetricsLog) -> None:
        """Save and sample where it is time; the step's row must be in `log` already."""
        train = self.config.train
        if self._due(train.save_every, step):
            self.save(state, step, log)
        if self._due(train.sample_every, step) and train.sample_tokens:
            with self._watchdog.during("sampling", step):
                self._sample(state, step)

    def save(self, state: TrainState, step: int, log: MetricsLog) -> None:
        """Start a checkpoint of a step, unless it has one."""
        train = self.config.train
        about = {
            "config": self.config.model_dump(mode="json"),
            "tokens": step * train.batch * train.context,
            "loader": {"step": step, "next_batch": self.loader.hash_at(step)},
        }
        loss = self._losses.get(step)
        with self._watchdog.during("save", step):
            self.checkpoints.save(step, checkpoint_items(state), about, loss, first=log.sync)

    def _due(self, every: int, step: int) -> bool:
        return step == self.config.train.total_steps or bool(every and step % every == 0)

    def _measure(self, state: TrainState, step: int) -> dict[str, float]:
        train = self.config.train
        batches = heldout_batches(self.config.data, train.context, train.batch)
        if step < train.total_steps:
            batches = islice(batches, train.validation_batches)
        self.last_validation = result = self._validate(state.params, batches)
        self._losses = {step: result.cross_entropy}
        self.progress.say(
            f"{self.config.attention}  step {step}  held out: "
            f"CE {result.cross_entropy:.4f}  {result.bits_per_byte:.4f} bits per byte"
        )
        return {
            "validation_loss": result.cross_entropy,
            "validation_bpb": result.bits_per_byte,
            "validation_tokens": result.tokens,
        }

    def _sample(self, state: TrainState, step: int) -> None:
        """Write text from each prompt to samples/."""
        tokenizer, train = self.loader.tokenizer, self.config.train
        prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in train.sample_prompts]
        stop = (tokenizer.bos,)
        if self.config.data.mixture is not None:
            chat = ChatFormat(tokenizer)
            prompts = [[tokenizer.bos, *chat.turn(text)] for text in train.sample_prompts]
            stop = chat.stops
        seed = int(jax.random.bits(jax.random.fold_in(state.rng, step)) >> 1)
        continued = generate(
            self.config.model,
            state.params,
            prompts,
            train.sample_tokens,
            sampling=SAMPLING,
            seed=seed,
            stop=stop,
        )
        between = "" if self.config.data.mixture is None else "\n"
        texts = [
            prompt + between + tokenizer.decode(ids)
            for prompt, ids in zip(train.sample_prompts, continued, strict=True)
        ]
        if processes.index() == 0:
            path = self.run_dir / "samples" / f"step-{step:08d}.txt"
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_text("\n\n".join(texts) + "\n")
            except OSError as error:  # a full disk stops no run
                self.progress.warn(f"{path} cannot be written ({error.strerror})")
