"""Beside the paper: how heads came to differ, over the checkpoints that a run still has.

    python experiments/evolution.py RUN... --out DIR

Reads `analysis_steps.json` from each run's directory, which the analysis of a run's steps writes.
"""

import json

import numpy as np

from lrkv_jax.artefacts import Artefact, Picture, command, empty, legend_below, look, panels
from lrkv_jax.comparison import KINDS, settings
from lrkv_jax.errors import LrkvError

PANELS = {
    "query-key forms": ("effective rank, % of its cap", ("query_key", "centred", "percent_of_cap")),
    "value-output forms": (
        "effective rank, % of its cap", ("value_output", "centred", "percent_of_cap"),
    ),
    "key residuals": ("‖U Bᵀ‖ / ‖W shared‖", ("magnitude", "key")),
}  # fmt: skip


def make(runs):
    shown, gaps = [], []
    for setting in settings(runs):
        steps = {kind: [analysed(run) for run in setting.main(kind).values()] for kind in KINDS}
        steps = {kind: [one for one in each if one] for kind, each in steps.items()}
        gaps += [
            f"no analysis of steps: {setting.name} {kind}" for kind in KINDS if not steps[kind]
        ]
        if any(steps.values()):
            shown.append((setting.name, steps))
    figure, axes = panels(max(1, len(shown)), len(PANELS), panel=(3.6, 3.0))
    for row, (name, steps) in zip(axes, shown, strict=False):
        for axis, (title, (unit, where)) in zip(row, PANELS.items(), strict=True):
            lines = {kind: line(steps[kind], where) for kind in KINDS if steps[kind]}
            for kind, (at, mean) in lines.items():
                if len(at):
                    axis.plot(at, mean, label=look(kind).name, **look(kind).style)
            axis.set_title(f"{name}: {title}")
            axis.set_xlabel("training steps")
            axis.set_ylabel(unit)
            if not any(len(at) for at, _ in lines.values()):
                empty(axis, f"no analysis of steps: {name} lrkv")
    if not shown:
        gaps = gaps or ["no analysis of steps: any scale"]
        for axis in axes[0]:
            empty(axis, "no analysis of steps: any scale")
    legend_below(figure)
    return Picture(
        "How heads came to differ", figure,
        "Means over layers and seeds at the steps that all seeds kept. Forms: entropy effective "
        "rank of the centred Gram matrix, in % of its cap H − 1. Residuals: mean over heads, over "
        "the shared part's norm.",
        gaps=gaps,
    )  # fmt: skip


def analysed(run):
    path = run.path / "analysis_steps.json"
    if not path.is_file():
        return None
    try:
        return {one["step"]: one for one in json.loads(path.read_text(encoding="utf-8"))["steps"]}
    except ValueError as error:
        raise LrkvError(f"{path} is not JSON: delete it and analyse the run again") from error


def line(seeds, where):
    """Steps that all seeds kept, and there the mean over seeds; none where it is undefined."""
    at = sorted(set.intersection(*map(set, seeds)))
    values = [[value(one[step], where) for one in seeds] for step in at]
    told = [place for place, row in enumerate(values) if None not in row]
    return [at[place] for place in told], [np.mean(values[place]) for place in told]


def value(moment, where):
    for name in where:
        moment = moment[name]
    if not isinstance(moment, dict):
        return moment
    return None if moment["shared"] is None else moment["residual"] / moment["shared"]


ARTEFACT = Artefact("evolution", "How heads came to differ", "Beside the paper", make)

if __name__ == "__main__":
    command(ARTEFACT)
