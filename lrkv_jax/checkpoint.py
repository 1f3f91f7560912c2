"""Checkpoints through Orbax: a whole run, saved asynchronously, restored onto any mesh.

A checkpoint holds named items, each a tree of arrays that can be read alone (a training state is
`params`, `optimizer` and `run`); its metadata is the manifest: resolved configuration, tokens,
versions.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from lrkv_jax.errors import LrkvError

_policies = ocp.training.preservation_policies
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Checkpointer:
    """The checkpoints of one run directory.

    Keeps the newest `keep` and the one with the lowest validation loss. Use as a context manager:
    leaving it waits for the save in progress.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2):
        for noisy in ("absl", "orbax"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        self.directory = Path(directory).absolute()
        best = _policies.BestN(
            get_metric_fn=lambda metrics: metrics["validation_loss"],
            reverse=True,  # the best is sorted last
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        newest = _policies.LatestN(n=keep)
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            preservation_policy=_policies.AnyPreservationPolicy([newest, best]),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error) -> None:
        self._orbax.close()

    def steps(self) -> list[int]:
        """The steps that can be restored, in order."""
        return sorted(checkpoint.step for checkpoint in self._orbax.checkpoints)

    def latest(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the lowest validation loss among those kept, or None."""
        scored = [c for c in self._orbax.checkpoints if c.metrics]
        return min(scored, key=lambda c: c.metrics["validation_loss"]).step if scored else None

    def save(
        self,
        step: int,
        items: dict[str, Any],
        manifest: dict[str, Any],
        validation_loss: float | None = None,
    ) -> None:
        """Start saving; returns once the arrays are copied, before they are written.

        `manifest` is JSON; the step and the libraries' versions are added to it. A step that is
        there already is left alone.
        """
        if step in self.steps():
            return
        manifest = {**manifest, "step": step, "versions": {p: version(p) for p in PACKAGES}}
        metrics = None if validation_loss is None else {"validation_loss": validation_loss}
        self._orbax.save_checkpointables_async(
            # Orbax adds the metrics to the dict that it is given.
            step,
            dict(items),
            custom_metadata=manifest,
            metrics=metrics,
            force=True,
        )

    def wait(self) -> None:
        """Return when the save in progress is committed."""
        self._orbax.wait()

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """The metadata saved with a step (the newest, unless given)."""
        return self._orbax.metadata(self._known(step)).custom_metadata

    def restore(self, abstract: dict[str, Any], step: int | None = None) -> dict[str, Any]:
        """The items that `abstract` names, of a step (the newest, unless given).

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings, of any mesh. Raises `LrkvError`
        if there is no such step or it holds other arrays.
        """
        step = self._known(step)
        try:
            return self._orbax.load_checkpointables(step, abstract)
        except (ValueError, KeyError, FileNotFoundError) as error:
            reason = " ".join(str(error).split())[:200]
            raise LrkvError(
                f"checkpoint {self.directory / str(step)} cannot be read as this model: {reason}"
            ) from error

    def _known(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise LrkvError(f"no checkpoint under {self.directory}: train the run first")
        if step is not None and step not in steps:
            raise LrkvError(f"no checkpoint of step {step}: there are {', '.join(map(str, steps))}")
        return steps[-1] if step is None else step
