"""Beside the paper: how heads came to differ, over the checkpoints that a run still has.

It reads `analysis_steps.json` in each run's directory, which `lrkv analyze --steps` writes.
"""

import numpy as np

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, empty, legend_below, panels
from lrkv_jax.artefacts.losses import looks_beside
from lrkv_jax.comparison import settings
from lrkv_jax.disk import read_json

TITLE = "How heads came to differ"
RANK = "effective rank, % of its cap"
# A panel: its title, its unit, and where the value stands in one step's analysis.
PANELS = (
    ("query-key forms", RANK, ("query_key", "centred", "percent_of_cap")),
    ("value-output forms", RANK, ("value_output", "centred", "percent_of_cap")),
    ("key residuals", "‖U Bᵀ‖ / ‖W shared‖", ("magnitude", "key")),
)


@artefact("Beside the paper", TITLE, reads="analyses")
def evolution(runs):
    shown, gaps = {}, []
    for setting, lines in looks_beside(settings(runs)).items():
        found = []
        for label, look, of_seed in lines:
            if steps := [each for each in map(_analysed, of_seed.values()) if each]:
                found.append((label, look, steps))
            else:
                gaps.append(f"no analysis of steps: {setting} {label}")
        if found:
            shown[setting] = found
    if not shown:
        return Picture(TITLE, None, gaps=gaps or ["no analysis of steps: any scale"])
    figure, axes = panels(len(shown), len(PANELS), panel=(3.6, 3.0))
    for row, (name, lines) in zip(axes, shown.items(), strict=True):
        for place, (axis, (what, unit, where)) in enumerate(zip(row, PANELS, strict=True)):
            for label, look, steps in lines:
                at, mean = _line(steps, where)
                if at:
                    axis.plot(at, mean, label=label, **look.style)
            if not axis.lines:
                empty(axis, "no LRKV run analysed")
                continue
            axis.set_title(what)
            axis.set_xlabel("training steps")
            axis.set_ylabel(unit if place else f"{name}\n{unit}")
    legend_below(figure)
    return Picture(
        TITLE, figure,
        "Means over layers and seeds at the steps that all seeds kept. Forms: entropy effective "
        "rank of the centred Gram matrix, in % of its cap H − 1. Residuals: mean over heads, over "
        "the shared part's norm.",
        gaps=gaps,
    )  # fmt: skip


def _analysed(run):
    found = read_json(run.path / "analysis_steps.json", "delete it and analyze the run again")
    return found and {one["step"]: one for one in found["steps"]}


def _line(seeds, where):
    """Return the steps that all seeds kept and the means over seeds, where they are defined."""
    at = sorted(set.intersection(*map(set, seeds)))
    values = [[_value(one[step], where) for one in seeds] for step in at]
    known = [place for place, row in enumerate(values) if None not in row]
    return [at[place] for place in known], [np.mean(values[place]) for place in known]


def _value(moment, where):
    for name in where:
        moment = moment[name]
    if not isinstance(moment, dict):
        return moment
    return None if moment["shared"] is None else moment["residual"] / moment["shared"]
