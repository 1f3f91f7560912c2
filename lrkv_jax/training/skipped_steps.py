"""Steps that the guard skipped: in the row, on the screen, and as a batch that is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from lrkv_jax.errors import LrkvError
from lrkv_jax.training.screen import Screen
from lrkv_jax.training.setup import Setup


def saved_batch(run_dir: Path, step: int) -> Path:
    """Where the batch of a skipped step is kept."""
    return run_dir / "skipped" / f"step-{step:08d}.npz"


class SkippedSteps:
    """Looks at every step's numbers, one step behind the devices; process 0 writes."""

    def __init__(self, setup: Setup, screen: Screen):
        self._config, self._loader = setup.config.guard, setup.loader
        self._run_dir, self._screen = setup.directory, screen
        self._processes = setup.processes

    def look(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with what the guard's numbers mean, in place of the numbers."""
        row = dict(row)
        batch = int(row.pop("batch_high")) << 16 | int(row.pop("batch_low"))
        row["batch"] = f"{batch:08x}"
        in_a_row, height = int(row.pop("in_a_row")), row.pop("spike")
        row["skipped"] = int(row["skipped"])
        spike = self._config.spike is not None and height > self._config.spike
        if spike:
            row["spike"] = height
        if in_a_row:
            row["skipped_in_a_row"] = in_a_row
            self._keep(row)
        elif spike:
            self._screen.warn(
                f"step {row['step']}: loss {row['loss']:.4g} is {height:.0f} deviations above the "
                f"last ones, gradient norm {row['grad_norm']:.3g}, batch {row['batch']}: taken "
                "(guard.skip_spikes=true leaves such steps out)"
            )
        return row

    def stop_if_hopeless(self, row: dict[str, Any]) -> None:
        """Raise `LrkvError` after `guard.stop_after` skipped steps in a row."""
        if row.get("skipped_in_a_row", 0) >= self._config.stop_after:
            step = row["step"]
            with self._processes.together():  # all have come to the same end: process 0 says it
                raise LrkvError(
                    f"{row['skipped_in_a_row']} steps in a row were skipped, up to step {step}: "
                    f"its batch is kept in {saved_batch(self._run_dir, step)}; a lower learning "
                    "rate or a higher guard.stop_after resumes from the last checkpoint"
                )

    def _keep(self, row: dict[str, Any]) -> None:
        step = row["step"]
        records = self._loader.records_of(step - 1)
        shown = ", ".join(map(str, records[:8])) + (", ..." if len(records) > 8 else "")
        what = "not finite" if not _finite(row) else f"a spike of {row['spike']:.0f} deviations"
        self._screen.warn(
            f"STEP {step} SKIPPED, {what}: loss {row['loss']:.4g}, gradient norm "
            f"{row['grad_norm']:.4g}, batch {row['batch']} of records {shown}; "
            f"{row['skipped']} skipped so far"
        )
        if self._processes.index != 0:
            return
        path = saved_batch(self._run_dir, step)
        try:
            path.parent.mkdir(exist_ok=True)
            np.savez(
                path,
                tokens=self._loader.whole_batch_at(step - 1),
                records=np.array(records),
                loss=row["loss"],
                grad_norm=row["grad_norm"],
            )
        except OSError as error:  # a full disk stops no run
            self._screen.warn(f"{path} cannot be written ({error.strerror})")


def _finite(row: dict[str, Any]) -> bool:
    return math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
