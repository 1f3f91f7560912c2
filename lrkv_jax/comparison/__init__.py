"""Finished runs beside one another: what they reached, how soon, and whether they differ."""

from lrkv_jax.comparison.contrasts import Contrast, against, combined, contrasts, spread, trend
from lrkv_jax.comparison.correlation import Correlation, correlation
from lrkv_jax.comparison.files import (
    keep,
    kept_by_name,
    pretraining,
    read_run_record,
    read_runs,
    read_sound_runs,
)
from lrkv_jax.comparison.rates import Family, Line, families
from lrkv_jax.comparison.runs import (
    Curve,
    RunRecord,
    Setting,
    every_setting,
    finished,
    settings,
)
from lrkv_jax.comparison.sooner import Sooner, sooner, sooner_over_seeds
