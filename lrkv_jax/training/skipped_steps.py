"""Steps that the guard skipped or found odd, as the log and the display report them."""

from __future__ import annotations

import math
from typing import Any

from lrkv_jax.errors import LrkvError
from lrkv_jax.training.progress import ProgressDisplay
from lrkv_jax.training.setup import Setup


class SkippedSteps:
    """Checks every step's numbers, one step behind the devices."""

    def __init__(self, setup: Setup, progress: ProgressDisplay):
        self._config, self._loader = setup.config.guard, setup.loader
        self._progress, self._processes = progress, setup.processes

    def check(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row for the log: `spike` and `skipped_in_a_row` only where there is one.

        Warns of both.
        """
        row = row | {"batch": f"{row['batch']:08x}"}
        in_a_row, height = row.pop("in_a_row"), row.pop("spike")
        spike = self._config.spike is not None and height > self._config.spike
        if spike:
            row["spike"] = height
        if in_a_row:
            row["skipped_in_a_row"] = in_a_row
            self._warn_of(row)
        elif spike:
            self._progress.warn(
                f"step {row['step']}: loss {row['loss']:.4g} is {height:.0f} deviations above the "
                f"last ones, gradient norm {row['grad_norm']:.3g}, batch {row['batch']}: taken "
                "(guard.skip_spikes=true leaves such steps out)"
            )
        return row

    def stop_if_hopeless(self, row: dict[str, Any]) -> None:
        """Raise `LrkvError` after `guard.stop_after` skipped steps in a row."""
        if row.get("skipped_in_a_row", 0) >= self._config.stop_after:
            with self._processes.together():  # all stop here: process 0 reports it
                raise LrkvError(
                    f"{row['skipped_in_a_row']} steps in a row were skipped, up to step "
                    f"{row['step']}: a lower learning rate or a higher guard.stop_after resumes "
                    "from the last checkpoint"
                )

    def _warn_of(self, row: dict[str, Any]) -> None:
        records = self._loader.records_of(row["step"] - 1)
        shown = ", ".join(map(str, records[:8])) + (", ..." if len(records) > 8 else "")
        what = "not finite" if not _finite(row) else f"a spike of {row['spike']:.0f} deviations"
        self._progress.warn(
            f"STEP {row['step']} SKIPPED, {what}: loss {row['loss']:.4g}, gradient norm "
            f"{row['grad_norm']:.4g}, batch {row['batch']} of records {shown}; "
            f"{row['skipped']} skipped so far"
        )


def _finite(row: dict[str, Any]) -> bool:
    return math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
