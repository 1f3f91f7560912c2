"""What a run starts from: its step's program, and its state, fresh or from a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data.loader import Loader
from lrkv_jax.runtime.compilation import Compiling
from lrkv_jax.sharding import batch_sharding
from lrkv_jax.train.init_from import first_state
from lrkv_jax.train.rows import RowFormat
from lrkv_jax.train.state import (
    TrainState,
    checkpoint_items,
    from_checkpoint_items,
)
from lrkv_jax.train.step import make_train_step, over_leaves


def compiling(config: RunConfig, mesh: Mesh, loader: Loader, abstract: TrainState) -> Compiling:
    """The step over an `abstract_state`'s leaves, on its way to being compiled for a batch."""
    train = config.train
    token_bytes_V = loader.tokenizer.token_bytes_up_to(config.model.vocabulary)
    rows = RowFormat.of(config, loader.tokenizer.bos)
    step = make_train_step(config, mesh, token_bytes_V, rows)
    tokens = jax.ShapeDtypeStruct(
        (train.batch, train.context + 1), jnp.int32, sharding=batch_sharding(mesh)
    )
    leaves = jax.tree.leaves(abstract)
    return Compiling(over_leaves(step, abstract, mesh), leaves, tokens, mesh=mesh)


def resumed(
    config: RunConfig,
    mesh: Mesh,
    checkpoints: Checkpointer,
    abstract: TrainState,
    *,
    before: int | None = None,
    set_aside: bool = False,
) -> tuple[TrainState, int]:
    """The state of the newest sound checkpoint (of a step under `before`) and its step; or a fresh
    one, and 0, if nothing was saved.

    Raises `LrkvError` as `Checkpointer.restore_newest` does.
    """
    restored = checkpoints.restore_newest(
        checkpoint_items(abstract), before=before, set_aside=set_aside
    )
    if restored is None:
        return first_state(config, mesh), 0
    step, items = restored
    return from_checkpoint_items(abstract, items), step
