"""Finished runs, compared: what they reached, how soon, and whether they differ."""

from lrkv_jax.lab.report.comparison.contrasts import (
    Contrast,
    against,
    combined,
    contrasts,
    correlation,
    mean_and_sd,
)
from lrkv_jax.lab.report.comparison.files import (
    archive_runs,
    archived_by_name,
    read_run_record,
    read_runs,
    read_sound_runs,
)
from lrkv_jax.lab.report.comparison.runs import (
    Curve,
    RunRecord,
    Setting,
    every_setting,
    finished,
    settings,
    steps_saved,
    steps_saved_by_seed,
)
