"""Finished runs beside one another: what they reached, how soon, and whether they differ."""

from lrkv_jax.comparison.correlation import Correlation, correlation
from lrkv_jax.comparison.paired import Paired, against, paired, spread
from lrkv_jax.comparison.runs import (
    Curve,
    RunRecord,
    Setting,
    every_setting,
    finished,
    pretraining,
    read_runs,
    settings,
)
from lrkv_jax.comparison.sooner import Sooner, sooner, sooner_over_seeds
