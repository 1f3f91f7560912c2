"""The state before a run's first step: fresh, or with the parameters of another run.

V vocabulary  D model width
"""

from __future__ import annotations

from dataclasses import replace

import jax
from jax.sharding import Mesh

from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import differences
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.run.restore import restore_parameters
from lrkv_jax.run.run_dir import read_run
from lrkv_jax.train.state import TrainState, init_state, state_shardings


def first_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """The state before the first step, placed on `mesh`.

    With `init_from` the parameters are that run's, the optimiser is fresh. A model of more ids than
    the run's keeps fresh rows of the embedding and columns of the head for those.

    Raises `LrkvError` for a run of another model or tokenizer, and as `restore_parameters` does.
    """
    state = init_state(config, mesh)
    if config.init_from is None:
        return state
    before = read_run(config.init_from)
    _check(config, before)
    _, params = restore_parameters(config.init_from, before.model, mesh, config.init_step)
    placed = state_shardings(config, mesh).params
    grown = jax.jit(
        lambda old, fresh: jax.tree.map(_into, old, fresh),
        out_shardings=placed, donate_argnums=1,
    )  # fmt: skip
    return replace(state, params=grown(params, state.params))


def _into(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """`fresh` with `old` in its first rows or columns; all of it, where the shapes are equal."""
    return jax.lax.dynamic_update_slice(fresh, old.astype(fresh.dtype), (0,) * fresh.ndim)


def _check(config: RunConfig, before: RunConfig) -> None:
    # Parameters mean the same when they are computed with in another type, and in a model of more
    # ids; nothing else may change.
    free = ("model.dtype", "model.vocabulary")
    for change in differences(before, config, ["result"]):
        if change.key.startswith("model.") and change.key not in free:
            raise LrkvError(
                f"init_from = {config.init_from} has {change.key} = {change.old}, and this run has "
                f"{change.new}: leave it as it was trained"
            )
    ours, theirs = config.model.vocabulary, before.model.vocabulary
    if ours < theirs:
        raise LrkvError(
            f"init_from = {config.init_from} has model.vocabulary = {theirs}, and this run has "
            f"{ours}: use that or more"
        )
    tokenizers = [load_tokenizer(run.data.tokenizer) for run in (before, config)]
    if tokenizers[0].fingerprint != tokenizers[1].fingerprint:
        raise LrkvError(
            f"init_from = {config.init_from} was trained with tokenizer {before.data.tokenizer}, "
            f"and data.tokenizer = {config.data.tokenizer} gives other ids: use that one"
        )
