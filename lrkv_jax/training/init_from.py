"""The state before a run's first step: fresh, or with the parameters of another run.

V vocabulary  D model width
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import differences
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.checkpointing.layout import numbered
from lrkv_jax.training.restore import restore_parameters
from lrkv_jax.training.run_dir import read_run
from lrkv_jax.training.state import TrainState, init_state, state_shardings


def check_init_from(config: RunConfig) -> None:
    """Raise `LrkvError` for an `init_from` of another model or tokenizer, or without that step.

    A run that has saved a step needs none any more.
    """
    if config.init_from is None or numbered(Path(config.directory) / "checkpoints"):
        return
    before, what = read_run(config.init_from), f"init_from = {config.init_from}"
    # Parameters mean the same when they are computed with in another type, and in a model of more
    # ids; nothing else may change.
    free = ("model.dtype", "model.vocabulary")
    for change in differences(before, config, ["semantics"]):
        if change.key.startswith("model.") and change.key not in free:
            raise LrkvError(
                f"{what} has {change.key} = {change.old}, and this run has {change.new}: leave it "
                "as it was trained"
            )
    ours, theirs = config.model.vocabulary, before.model.vocabulary
    if ours < theirs:
        raise LrkvError(
            f"{what} has model.vocabulary = {theirs}, and this run has {ours}: use that or more"
        )
    _check_tokenizer(what, config, before)
    with Checkpointer(Path(config.init_from) / "checkpoints") as checkpoints:
        checkpoints.path(config.init_step)


def initial_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """The state before the first step, placed on `mesh`.

    With `init_from` the parameters are that run's, the optimizer is fresh. A model of more ids than
    the run's keeps fresh rows of the embedding and columns of the head for those.

    Raises `LrkvError` as `restore_parameters` does.
    """
    state = replace(init_state(config, mesh), teacher=teacher_of(config, mesh))
    if config.init_from is None:
        return state
    model = read_run(config.init_from).model
    _, params = restore_parameters(config.init_from, model, mesh, config.init_step)
    shardings = state_shardings(config, mesh).params
    grown = jax.jit(
        lambda old, fresh: jax.tree.map(_into, old, fresh),
        out_shardings=shardings, donate_argnums=1,
    )  # fmt: skip
    return replace(state, params=grown(params, state.params))


def with_teacher(config: RunConfig) -> RunConfig:
    """The configuration with its teacher's step, unless given, and its teacher's model.

    The step is the newest, or the one with which the run began. The model computes in the run's
    dtype and by its kernel. Raises `LrkvError` for a teacher of another tokenizer or of other ids,
    and for one without that checkpoint.
    """
    if config.train.teacher is None:
        return config
    run = read_run(config.train.teacher)
    what = f"train.teacher = {config.train.teacher}"
    if run.model.vocabulary != config.model.vocabulary:
        raise LrkvError(
            f"{what} has model.vocabulary = {run.model.vocabulary}, and this run has "
            f"{config.model.vocabulary}: use a teacher of the same ids"
        )
    _check_tokenizer(what, config, run)
    how = {name: getattr(config.model, name) for name in ("dtype", "train_kernel")}
    model = run.model.model_copy(update=how)
    step = config.train.teacher_step
    if step is None and (Path(config.directory) / "config.yaml").is_file():
        begun = read_run(config.directory).train
        step = begun.teacher_step if begun.teacher == config.train.teacher else None
    with Checkpointer(Path(config.train.teacher) / "checkpoints") as checkpoints:
        step = checkpoints.manifest(step)["step"]
    train = config.train.model_copy(update={"teacher_model": model, "teacher_step": step})
    return config.model_copy(update={"train": train})


def teacher_of(config: RunConfig, mesh: Mesh) -> Any:
    """The teacher's parameters, placed as in training; () without a teacher."""
    train = config.train
    if train.teacher is None or train.teacher_model is None:
        return ()
    return restore_parameters(train.teacher, train.teacher_model, mesh, train.teacher_step)[1]


def _into(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """`fresh` with `old` in its first rows or columns; all of it, where the shapes are equal."""
    return jax.lax.dynamic_update_slice(fresh, old.astype(fresh.dtype), (0,) * fresh.ndim)


def _check_tokenizer(what: str, config: RunConfig, before: RunConfig) -> None:
    old, new = before.data.tokenizer, config.data.tokenizer
    if load_tokenizer(old).fingerprint != load_tokenizer(new).fingerprint:
        raise LrkvError(
            f"{what} was trained with tokenizer {old}, and data.tokenizer = {new} gives other ids: "
            "use that one"
        )
