"""What a run is made of before it begins: the configuration, resolved, its mesh and its data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lrkv_jax.config import RunConfig
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.dataset import dataset
from lrkv_jax.data.loader import Loader, Records, make_loader
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.distributed.batches import local_rows
from lrkv_jax.distributed.mesh import check_mesh, make_mesh
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.accounting.counts import program_bytes
from lrkv_jax.optim import learning_rates
from lrkv_jax.training.init_from import with_teacher
from lrkv_jax.training.rows import RowFormat
from lrkv_jax.training.state import resolve


@dataclass(frozen=True)
class Setup:
    """A run that can be: `config` has no `auto` and counts its steps, `loader` reads its batches.

    Of several `processes` each has one, with its rows of the batch.
    """

    config: RunConfig
    mesh: Mesh
    loader: Loader
    processes: Processes

    @property
    def directory(self) -> Path:
        return Path(self.config.directory)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch * self.config.train.context

    @cached_property
    def placed(self) -> NamedSharding:
        """Where the rows of a batch lie."""
        return batch_sharding(self.mesh)

    @cached_property
    def rows(self) -> RowFormat:
        return RowFormat.of(self.config, self.loader.tokenizer.bos)

    @cached_property
    def token_bytes_V(self) -> np.ndarray:
        return self.loader.tokenizer.token_bytes_up_to(self.config.model.vocabulary)


def mesh_of(
    config: RunConfig, devices: list[jax.Device] | None, processes: Processes
) -> tuple[RunConfig, Mesh]:
    """The configuration without `auto`, and the mesh it asks for, of all devices unless given.

    Raises `LrkvError`, in all processes, for a mesh or a schedule that does not fit.
    """
    with processes.together():
        config = with_teacher(resolve(config))
        mesh = make_mesh(config.mesh, devices)
        check_mesh(config, mesh)
        if config.train.epochs is None:
            learning_rates(config.optimizer, config.train.total_steps)
    return config, mesh


def with_data(config: RunConfig, mesh: Mesh, processes: Processes) -> Setup:
    """The run with its data, built if need be by process 0 while the others wait.

    `train.epochs` becomes `train.steps`. Raises `LrkvError`, in all processes, as
    `lrkv_jax.data.dataset.dataset` does, and where the tokenizer, or a chat's frame, has ids that
    the model does not have.
    """
    data, train = config.data, config.train
    with processes.together():
        if processes.index == 0:
            dataset(data, train.context)
    with processes.together():
        if train.epochs is not None:
            records = len(Records(dataset(data, train.context), "train"))
            steps = -(-records * train.epochs // train.batch)
            train = train.model_copy(update={"steps": steps})
            config = config.model_copy(update={"train": train})
            learning_rates(config.optimizer, train.total_steps)
        _check_vocabulary(config)
        rows = local_rows(batch_sharding(mesh), train.batch)
        loader = make_loader(data, train.context, train.batch, rows=rows, epochs=train.epochs)
    return Setup(config, mesh, loader, processes)


def _check_vocabulary(config: RunConfig) -> None:
    tokenizer = load_tokenizer(config.data.tokenizer)
    have, need = config.model.vocabulary, tokenizer.vocabulary
    if have < need:
        raise LrkvError(
            f"model.vocabulary = {have} is smaller than tokenizer {config.data.tokenizer}'s "
            f"{need}: set model.vocabulary={need}"
        )
    if config.data.mixture is not None:
        ChatFormat(tokenizer).check(have)


def memory_warning(step: jax.stages.Compiled, mesh: Mesh) -> str | None:
    """A line if a step needs more bytes of a device than JAX may take, where that is known."""
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in mesh.local_devices]
    limit, needs = min(filter(None, limits), default=None), program_bytes(step)
    if limit is None or needs <= limit:
        return None
    return (
        f"a training step needs {needs / 1e9:.3g} GB of each device, and JAX may take "
        f"{limit / 1e9:.3g} GB: it may run out of memory; `lrkv plan` says what would fit"
    )
