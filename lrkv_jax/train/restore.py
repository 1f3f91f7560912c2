"""A trained run, ready to be evaluated or decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import MeshConfig, ModelConfig, RunConfig, load_config
from lrkv_jax.model import init_parameters, specs
from lrkv_jax.sharding import make_mesh, parameter_shardings
from lrkv_jax.train.run_dir import read_run


@dataclass(frozen=True)
class TrainedRun:
    """A run's configuration and the parameters of one of its steps, placed on `mesh`."""

    config: RunConfig
    step: int
    params: Any
    mesh: Mesh


def load_run(
    directory: str | Path, *, step: int | str | None = None, overrides: Sequence[str] = ()
) -> TrainedRun:
    """Read a run's parameters: of its newest step, of `step`, or of the `best` one kept.

    Parameters are replicated over all devices, whatever mesh trained them; `overrides`, such as
    `mesh.fsdp=8 mesh.data=1`, change that and other settings that leave the model as it is.
    Raises `LrkvError` if there is no run, no checkpoint or no such step.
    """
    config = read_run(directory)
    if overrides:
        changed = load_config(Path(directory) / "config.yaml", overrides)
        config = changed.model_copy(update={"run_dir": str(directory)})
    if not any(override.startswith("mesh.") for override in overrides):
        config = config.model_copy(update={"mesh": MeshConfig(data=-1, fsdp=1)})
    mesh = make_mesh(config.mesh)
    step, params = restore_parameters(directory, config.model, mesh, step)
    return TrainedRun(config, step, params, mesh)


def restore_parameters(
    directory: str | Path, model: ModelConfig, mesh: Mesh, step: int | str | None
) -> tuple[int, Any]:
    """The parameters of one of a run's steps (of the newest unless given), placed as in training.

    Raises `LrkvError` as `Checkpointer.restore` does.
    """
    shapes = jax.eval_shape(lambda: init_parameters(model, 0))
    placed = parameter_shardings(specs(model), shapes, mesh)
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        placed,
    )
    with Checkpointer(Path(directory) / "checkpoints") as checkpoints:
        step = checkpoints.best() if step == "best" else step
        step, items = checkpoints.restore({"params": abstract}, step)
    return step, items["params"]
