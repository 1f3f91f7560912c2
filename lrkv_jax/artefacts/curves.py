"""Held-out loss against training, a line for each variant: what figures 2, 4 and 5 have in common.

Above the losses, below the same over a baseline's of the same seed: what variants differ by is a
hundredth of what training changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from lrkv_jax.artefacts.figure import Picture, empty, legend_below, panels
from lrkv_jax.artefacts.looks import Look, look
from lrkv_jax.comparison import KINDS, Curve, RunRecord, Setting, finished

NOTE = (
    "Above: means over seeds. Below: the same over {baseline}'s of the same seed; bands are one "
    "standard deviation. Upper axis: training FLOPs of {baseline}, 6·(N − lookup) + 12·L·H·K·T a "
    "token. Losses are of the same held-out text all along."
)


@dataclass(frozen=True)
class Line:
    """A line of the picture: how it looks, its runs by seed, and what its gap is called."""

    look: Look
    runs: Mapping[int, RunRecord]
    missing: str

    @property
    def curves(self) -> dict[int, Curve]:
        """By seed, of finished runs that were validated; of running ones where none is finished.

        One that has just begun would cut the others' mean short.
        """
        done = finished(self.runs) or self.runs
        return {seed: run.curve for seed, run in done.items() if run.curve}


def curves(
    title: str,
    columns: Mapping[str, Mapping[str, Line]],
    *,
    baseline: str,
    gap: str,
    name: str = "",
) -> Picture:
    """Columns of two panels: {setting: {name of a line: the line}}, `baseline` one of the names.

    `gap` says what is missing where there are no columns.
    """
    figure, axes = panels(2, max(1, len(columns)), sharex="col", panel=(4.2, 2.9))
    gaps = [] if columns else [f"no run: {gap}"]
    for column, (setting, lines) in zip(zip(*axes, strict=True), columns.items(), strict=False):
        _column(column, setting, lines, baseline)
        gaps += [f"no run: {line.missing}" for line in lines.values() if not line.curves]
    if not columns:
        for (axis,) in axes:
            empty(axis, gaps[0])
    legend_below(figure)
    words = next((lines[baseline].look.name for lines in columns.values()), baseline)
    return Picture(title, figure, NOTE.format(baseline=words), gaps=gaps, name=name)


def five_variants(shown: Sequence[Setting]) -> dict[str, dict[str, Line]]:
    """A column for each setting that has a curve, a line in it for each kind."""
    return {
        setting.name: {
            kind: Line(look(kind), setting.main(kind), f"{setting.name} {kind}") for kind in KINDS
        }
        for setting in shown
        if any(run.curve for run in setting.runs)
    }


def _column(axes: Sequence[Axes], setting: str, lines: Mapping[str, Line], baseline: str) -> None:
    above, below = axes
    reference = lines[baseline].curves
    for line in lines.values():
        own = line.curves
        _line(above, line.look, [(curve, curve.cross_entropy) for curve in own.values()])
        _line(below, line.look, [
            (curve, curve.cross_entropy[:shared] - other.cross_entropy[:shared])
            for seed, curve in own.items()
            if (other := reference.get(seed)) and other.heldout_tokens == curve.heldout_tokens
            and (shared := min(len(other.steps), len(curve.steps)))
        ])  # fmt: skip
    named = lines[baseline].look.name
    above.set_title(setting)
    above.set_ylabel("held-out cross-entropy,\nnats/token")
    below.set_xlabel("training tokens")
    below.xaxis.set_major_formatter(EngFormatter())
    if not reference:
        empty(below, f"no run: {lines[baseline].missing}")
        return
    below.set_ylabel(f"over {named}'s, nats/token")
    curve = next(iter(reference.values()))
    flops = curve.flops[-1] / curve.tokens[-1]
    top = above.secondary_xaxis("top", (lambda t: t * flops, lambda f: f / flops))
    top.set_xlabel(f"training FLOPs ({named})")
    top.xaxis.set_major_formatter(EngFormatter())
    top.xaxis.set_major_locator(MaxNLocator(5))


def _line(axis: Axes, one: Look, seeds: Sequence[tuple[Curve, np.ndarray]]) -> None:
    """The mean over seeds as far as all of them are, and its band."""
    if not seeds:
        return
    points = min(len(values) for _, values in seeds)  # a run may still be going
    tokens = seeds[0][0].tokens[:points]
    values = np.stack([values[:points] for _, values in seeds])
    mean = values.mean(0)
    axis.plot(tokens, mean, label=one.name, markevery=0.15, **one.style)
    if len(values) > 1:
        sd = values.std(0, ddof=1)
        axis.fill_between(tokens, mean - sd, mean + sd, color=one.colour, alpha=0.15, lw=0)
