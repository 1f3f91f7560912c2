"""A run's parameters read from its checkpoints, placed on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jax.sharding import Mesh

from lrkv_jax.config import MeshConfig, ModelConfig
from lrkv_jax.config.differences import covers
from lrkv_jax.config.history import asked_dtype
from lrkv_jax.config.load import parse_overrides
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.models.layers import resolve_dtype
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.run_dir import read_run
from lrkv_jax.training.state import placed_parameters


def load_run(
    directory: str | Path,
    *,
    step: int | str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> TrainedRun:
    """Read a run with the parameters of its newest step, of `step`, or of the `best` one kept.

    Parameters are replicated over all devices, whatever mesh trained them; `overrides`, such as
    `mesh.fsdp=8 mesh.data=1`, change that and other settings that do not change the model.
    A `model.dtype` of auto, with which the run was trained, is what suits this machine.
    Raises `LrkvError` if there is no run, no checkpoint or no such step, and for `best` where none
    was validated.
    """
    config = read_run(directory, overrides)
    changed = [key for key, _ in parse_overrides(overrides)]
    requested = asked_dtype(directory, config.model.dtype)
    # Requested as auto, it may have become a different dtype on the training machine.
    if requested != config.model.dtype and not covers(changed, "model.dtype"):
        model = config.model.model_copy(update={"dtype": resolve_dtype(requested).name})
        config = config.model_copy(update={"model": model})
    if not any(covers(["mesh"], key) for key in changed):
        config = config.model_copy(update={"mesh": MeshConfig(data=-1, fsdp=1)})
    mesh = make_mesh(config.mesh)
    step, params = restore_parameters(directory, config.model, mesh, step)
    return TrainedRun(config, step, params, mesh, Path(directory))


def restore_parameters(
    directory: str | Path, model: ModelConfig, mesh: Mesh, step: int | str | None
) -> tuple[int, Any]:
    """The parameters of one of a run's steps (of the newest unless given), placed as in training.

    Raises `LrkvError` as `Checkpointer.restore` does.
    """
    with Checkpointer(Path(directory) / "checkpoints") as checkpoints:
        if step == "best":
            step = checkpoints.best()
            if step is None and checkpoints.steps():
                raise LrkvError(
                    f"no step kept in {directory} was validated: name one, or leave step out"
                )
        found, items = checkpoints.restore(
            {"params": placed_parameters(model, mesh)}, cast(int | None, step)
        )
    return found, items["params"]
