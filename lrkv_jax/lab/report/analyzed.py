"""Analyzed runs: which are compared with one another, and how each variant of them looks.

Everything is read from `analysis.json` (`lrkv_jax.lab.analysis.analyze`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.comparison.contrasts import mean_and_sd
from lrkv_jax.lab.report.comparison.runs import RunRecord, Setting, every_setting
from lrkv_jax.lab.report.figures import Picture, draw_mean
from lrkv_jax.lab.report.styles import StyledVariant
from lrkv_jax.lab.report.tables import Cell

FORMS = {"query_key": "query–key forms", "value_output": "value–output forms"}
FAMILIES = {"key": "keys", "value": "values"}
VIEWS = {"uncentred": "uncentered", "centred": "centered (PCA)"}  # by the keys of analysis.json


class AnalyzedVariant(StyledVariant):
    """One label's analyzed runs by seed, as in MLA-128."""

    def each(self, value: Callable[..., Any]) -> dict[int, Any]:
        """A value of each seed's analysis."""
        return {seed: value(run.analysis) for seed, run in self.runs.items()}

    def mean(self, value: Callable[..., Any]) -> np.ndarray:
        """The mean over seeds of an array."""
        return mean_and_sd(self.each(value).values())[0]

    def cell(self, value: Callable[..., Any], **rest: Any) -> Cell:
        """A table's cell of a number: its mean over seeds, and its spread."""
        return Cell.over(self.each(value), **rest)

    @property
    def first(self) -> dict[str, Any]:
        """The lowest seed's analysis."""
        return self.runs[min(self.runs)].analysis


@dataclass(frozen=True)
class AnalyzedSetting:
    """The analyzed runs of one setting.

    `variants` are those that are compared (`Setting.beside`), or all if there are none;
    `every` has all, an ablation's too.
    """

    name: str
    variants: list[AnalyzedVariant]
    every: list[AnalyzedVariant]

    @property
    def layers(self) -> int:
        return self.every[0].first["layers"]

    @property
    def heads(self) -> int:
        return self.every[0].first["heads"]

    def cap(self, view: str) -> int:
        """The largest possible effective rank: heads less their mean span a dimension less."""
        return self.heads - (view == "centred")

    @property
    def depths(self) -> dict[str, int]:
        """An early, a middle and a late layer, by title; fewer where there are fewer."""
        names = {1: ["only"], 2: ["early", "late"]}.get(self.layers, ["early", "middle", "late"])
        places = sorted({0, self.layers // 2, self.layers - 1})
        return {
            f"{name}: layer {place + 1} of {self.layers}": place
            for name, place in zip(names, places, strict=True)
        }

    def of(self, *kinds: str) -> list[AnalyzedVariant]:
        """Every variant of these kinds."""
        return [one for kind in kinds for one in self.every if one.kind == kind]

    @property
    def seeds(self) -> str:
        """The number of seeds of the means, in words."""
        counts = {one.label: len(one.runs) for one in self.every}
        if len(set(counts.values())) > 1:
            return "Seeds: " + ", ".join(f"{name} {n}" for name, n in counts.items()) + "."
        (n,) = set(counts.values())
        return "One seed." if n == 1 else f"Means over {n} seeds."


def analyzed_settings(runs: Sequence[RunRecord]) -> list[AnalyzedSetting]:
    """The settings that have analyzed runs."""
    return [
        _analyzed(setting)
        for setting in every_setting(runs)
        if any(run.analysis for run in setting.runs)
    ]


def _analyzed(setting: Setting) -> AnalyzedSetting:
    runs: dict[str, dict[int, RunRecord]] = {}
    analyses: dict[int, RunRecord] = {}  # by their step
    for run in setting.runs:
        if run.analysis:
            runs.setdefault(run.label, {})[run.seed] = run
            analyses[run.analysis.get("step", run.steps_done)] = run
    if len(analyses) > 1:
        (step, one), (another, other), *_ = sorted(analyses.items(), key=lambda item: item[0])
        raise LrkvError(
            f"{one.path} was analyzed at step {step}, and {other.path} at {another}: lrkv analyze "
            "them at one step"
        )
    every = AnalyzedVariant.styled(runs)
    shown = [one for one in every if one.label in setting.beside]
    return AnalyzedSetting(setting.name, shown or every, every)


def pictures(
    runs: Sequence[RunRecord], draw: Callable[[AnalyzedSetting], Picture | None]
) -> list[Picture]:
    """The pictures that `draw` makes, one for each setting, named after it."""
    found = analyzed_settings(runs)
    drawn = [(setting.name, picture) for setting in found if (picture := draw(setting))]
    for name, picture in drawn:
        picture.title = f"{picture.title}, {name}"
        if len(found) > 1:
            picture.name = re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")
    return [picture for _, picture in drawn]


def draw_variant(
    axis: Axes,
    x: Sequence[float] | np.ndarray,
    variant: AnalyzedVariant,
    value: Callable[..., Any],
    **style: Any,
) -> None:
    """Draw a variant's mean over seeds with a band of one standard deviation."""
    usual = variant.style.plot | {"label": variant.label, "markevery": max(1, len(x) // 12)}
    draw_mean(axis, x, variant.each(value).values(), **usual | style)


def layer_axis(axis: Axes, layers: int) -> np.ndarray:
    """Number the layers from 1; returns their places."""
    axis.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axis.set_xlim(1 - 0.02 * layers, layers + 0.02 * layers)
    axis.set_xlabel("layer")
    return np.arange(1, layers + 1)
