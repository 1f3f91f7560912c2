"""The parts of a run before it begins: the configuration, resolved, its mesh and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lrkv_jax import __version__
from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import settings_of
from lrkv_jax.config.frozen import ROLES
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import Conversation, text_message
from lrkv_jax.data.loader import Loader, Records, make_loader
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.distributed.mesh import check_mesh, make_mesh
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.distributed.rules import batch_sharding, local_rows
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.models.transformer import abstract_parameters
from lrkv_jax.optim import learning_rates
from lrkv_jax.training.init_from import check_init_from, with_teacher
from lrkv_jax.training.state import resolve
from lrkv_jax.training.token_batch import BatchFormat


@dataclass(frozen=True)
class Setup:
    """A run that can be: `config` has no `auto` and counts its steps, `loader` reads its batches.

    `records` is the folder that they lie in, also where its source has grown since the start.
    Of several `processes` each has one, with its rows of the batch. `more_tokens` and `more_flops`
    are what the steps of other batches, before this start, had more.
    """

    config: RunConfig
    mesh: Mesh
    loader: Loader
    records: Path
    processes: Processes
    more_tokens: int = 0
    more_flops: float = 0.0

    @property
    def directory(self) -> Path:
        return Path(self.config.directory)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.train.seq_len

    def tokens_until(self, step: int) -> int:
        """The tokens of all steps up to this one."""
        return step * self.tokens_per_step + self.more_tokens

    @cached_property
    def flops_per_token(self) -> float:
        return training_flops_per_token(self.config.model, self.config.train.seq_len)

    def flops_until(self, step: int) -> float:
        """The floating-point operations of all steps up to this one."""
        return self.tokens_until(step) * self.flops_per_token + self.more_flops

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch's rows."""
        return batch_sharding(self.mesh)

    @cached_property
    def batch_format(self) -> BatchFormat:
        return BatchFormat.of(self.config, self.loader.tokenizer.bos)

    @cached_property
    def token_bytes_V(self) -> np.ndarray:
        return self.loader.tokenizer.token_bytes_up_to(self.config.model.vocabulary)


def resolve_with_mesh(
    config: RunConfig, devices: list[jax.Device] | None, processes: Processes
) -> tuple[RunConfig, Mesh]:
    """The configuration without `auto`, and its mesh, of all devices unless given.

    Raises `LrkvError`, in all processes, for a mesh, a schedule, a teacher or an `init_from` that
    does not fit, as `abstract_parameters` does, and where processes differ in a setting or version
    that makes other steps.
    """
    with processes.together():
        config = with_teacher(resolve(config))
        check_init_from(config)
        mesh = make_mesh(config.mesh, devices)
        check_mesh(config, mesh)
        abstract_parameters(config.model)
        if config.train.epochs is None:
            learning_rates(config.optimizer, config.train.total_steps)
    settings = {
        key: str(value)
        for key, (role, value) in settings_of(config, tuple(ROLES)).items()
        # Others, such as paths, may differ by host; what lies there is compared with the data.
        if role in ("semantics", "schedule") or key.startswith(("model.", "mesh."))
    }
    libraries = {"lrkv_jax's version": __version__, "jax's version": jax.__version__}
    processes.check_equal(settings | libraries)
    return config, mesh


def prepare_data(
    config: RunConfig, mesh: Mesh, processes: Processes, tell: Callable[[str], None]
) -> Setup:
    """The run with its data, built if need be by process 0 while the others wait.

    `tell` gets a line when a build begins, and for records without their source. `train.epochs`
    becomes `train.steps`. Raises `LrkvError`, in all processes, as `build_dataset` does, where the
    tokenizer, or a chat's frame, has ids that the model does not have, for a sample's prompt that
    the chat does not take, and where they have other data.
    """
    data, train = config.data, config.train
    told: list[str] = []

    def progress(what: str, done: float, total: int) -> None:
        if not told:
            told.append("mixture" if data.mixture else data.source)
            size = f", {total:,} {what.split()[0]}" if total else ""
            why = f"{data.directory} has none of this content with these settings"
            tell(f"building the records of {told[0]}{size}: {why}")

    with processes.together():
        if processes.index == 0:
            path = build_dataset(data, train.seq_len, progress=progress, warn=tell)
    with processes.together():
        if processes.index != 0:
            path = build_dataset(data, train.seq_len, progress=progress)
        if train.epochs is not None:
            records = len(Records(path, "train"))
            steps = -(-records * train.epochs // train.global_batch_size)
            train = train.model_copy(update={"steps": steps})
            config = config.model_copy(update={"train": train})
            learning_rates(config.optimizer, train.total_steps)
        _check_vocabulary(config)
        rows = local_rows(batch_sharding(mesh), train.global_batch_size)
        loader = make_loader(
            data, train.seq_len, train.global_batch_size,
            rows=rows, epochs=train.epochs, folder=path,
        )  # fmt: skip
        if train.sample_tokens:
            sample_prompts(config, loader.tokenizer)
        content = {} if processes.count == 1 else _content(config, loader, path)
    processes.check_equal(content)
    return Setup(config, mesh, loader, path, processes)


def _content(config: RunConfig, loader: Loader, path: Path) -> dict[str, str]:
    """What the processes of a run must have in common, wherever the data of each lie."""
    source = "data.source" if config.data.mixture is None else "data.mixture.folder"
    return {
        f"the hash of {source}": loader.fingerprint,
        "the hash of data.tokenizer": loader.tokenizer.fingerprint,
        "the number of training records": str(loader.records),
        "the number of held-out records": str(len(Records(path, "heldout"))),
        "the hash of the first batch": loader.hash_at(0),
    }


def sample_prompts(config: RunConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of `train.sample_prompts`, each as a document begins, or as a question of a chat.

    Raises `LrkvError` for one that the chat's format does not take.
    """
    texts = config.train.sample_prompts
    if config.data.mixture is None:
        return [tokenizer.prompt(text) for text in texts]
    chat = ChatFormat(tokenizer)
    try:
        return [chat.prompt(Conversation((text_message("user", text),))) for text in texts]
    except LrkvError as error:
        raise LrkvError(f"train.sample_prompts: {error}") from error


def _check_vocabulary(config: RunConfig) -> None:
    tokenizer = load_tokenizer(config.data.tokenizer)
    have, need = config.model.vocabulary, tokenizer.vocabulary
    if have < need:
        raise LrkvError(
            f"model.vocabulary = {have} is smaller than tokenizer {config.data.tokenizer}'s "
            f"{need}: set model.vocabulary={need}"
        )
    if config.data.mixture is None:
        return
    chat = ChatFormat(tokenizer)
    chat.check(have)
    for name in ("document_mask", "document_positions"):
        if getattr(config.train, name) and not chat.marks_its_start:
            raise LrkvError(
                f"train.{name}: conversations are separated by a BOS at their start, which the "
                f"chat of tokenizer {config.data.tokenizer} does not write, or not once: set "
                f"train.{name}=false"
            )
