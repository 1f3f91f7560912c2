"""Described in the paper, not shown: mean similarity of heads by layer, each variant less MHA.

The paper puts LRKV within 0.02 to 0.04 of MHA; the noise of random layers is drawn beside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lrkv_jax.artefacts.analysed import (
    FORMS,
    Group,
    Line,
    groups,
    layer_axis,
    pictures,
)
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, draw_mean, empty, legend_below, mean_and_sd, panels
from lrkv_jax.artefacts.looks import GREY
from lrkv_jax.artefacts.printed import printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table, no_run
from lrkv_jax.comparison import RunRecord, against

TITLE = "Mean similarity of heads, less MHA's"


@artefact("Described, not shown", TITLE, reads="analyses")
def similarity_gap(runs):
    return [*pictures(runs, TITLE, _picture), _table(runs)]


def gaps_by_layer(line: Line, baseline: Line | None, form: str) -> dict[int, np.ndarray]:
    """Mean off-diagonal cosine by layer, less the baseline's of the same seed, for each seed."""
    if baseline is None or len(line.first[form]["per_layer"][0]["gram"]) == 1:
        return {}
    ours, theirs = (one.each(lambda a: _means(a, form)) for one in (line, baseline))
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def _means(analysis, form) -> np.ndarray:
    return np.array([layer["mean_off_diagonal"] for layer in analysis[form]["per_layer"]])


def _baseline(group: Group) -> Line | None:
    return next(iter(group.of("mha")), None)


def _picture(group: Group) -> Picture:
    """The gap of each variant by layer; the paper's band, and that of two random layers."""
    figure, axes = panels(1, len(FORMS))
    claim = printed("heads", "similarity_gap")
    baseline, missing = _baseline(group), []
    for axis, (form, title) in zip(axes[0], FORMS.items(), strict=True):
        drawn = False
        places = layer_axis(axis, group.layers)
        for line in group.lines:
            gaps = gaps_by_layer(line, baseline, form)
            if line is baseline or not gaps:
                continue
            mean, sd = mean_and_sd(gaps.values())
            draw_mean(
                axis, places, mean, sd, label=line.label, markevery=max(1, group.layers // 12),
                **line.look.style,
            )  # fmt: skip
            drawn = True
        if not drawn:
            missing.append(f"no pair of runs with MHA: {group.name}")
            empty(axis, missing[-1])
            continue
        axis.axhline(0, color="black", lw=0.8)
        low, high = map(float, claim.text.split("-"))
        for sign, label in ((1, f"the paper's {claim.text} for LRKV"), (-1, None)):
            axis.axhspan(
                sign * low, sign * high, facecolor="none", edgecolor="#AAAAAA", hatch="////",
                lw=0, label=label,
            )  # fmt: skip
        if noise := _noise(baseline, form):
            axis.axhspan(
                -noise, noise, color=GREY, alpha=0.3, lw=0, label="two random layers, ±1 sd"
            )
        axis.set_title(title)
    axes[0][0].set_ylabel("mean cosine of heads, less MHA's")
    legend_below(figure, 6)
    return Picture(
        TITLE, figure,
        "Mean off-diagonal cosine by layer, less MHA's of the same seed and layer; bands: one "
        f"standard deviation over seeds. {group.seeds}", gaps=missing,
    )  # fmt: skip


def _noise(baseline: Line, form: str) -> float | None:
    sd = baseline.first[form]["null"]["sd"]["mean_off_diagonal"]
    return None if sd is None else sd * 2**0.5  # of the difference of two layers


COLUMNS = [
    Column("variant"),
    Column("mean cosine", digits=4),
    Column("less MHA's", digits=4),
    Column("difference from MHA"),
    Column("largest gap of a layer", digits=4),
    Column("layers within 0.04", digits=0),
]


def _table(runs: Sequence[RunRecord]) -> Table:
    """The gaps of query–key forms as means over layers, tested over seeds."""
    claim = printed("heads", "similarity_gap")
    rows = [row for group in groups(runs)[0] for row in _gap_rows(group)]
    return Table(
        TITLE, COLUMNS, rows, missing=[] if rows else ["no run: any scale, analysed"],
        notes=[
            "Mean off-diagonal cosine of query–key forms, mean over layers, ± standard deviation "
            "over seeds. Difference: seeds as blocks, p adjusted by Holm. Largest gap and "
            "layers within: of means over seeds. The paper says, without showing it, that "
            f"LRKV is within {claim.text} of MHA across layers.",
        ],
        name="table",
    )  # fmt: skip


def _gap_rows(group: Group):
    baseline = _baseline(group)
    means = {line.label: line.each(lambda a: a["query_key"]["mean"]["mean_off_diagonal"])
             for line in group.every}  # fmt: skip
    if None in {value for seeds in means.values() for value in seeds.values()}:
        return  # one head has no other to be like
    others = {name: seeds for name, seeds in means.items() if baseline and name != baseline.label}
    tests = against(means[baseline.label], others) if baseline else {}
    for line in group.every:
        cells: list[Any] = [Cell.over(means[line.label])]
        gaps = gaps_by_layer(line, baseline, "query_key")
        if line.label in others and gaps:
            mean, _ = mean_and_sd(gaps.values())
            over_layers = {seed: float(gap.mean()) for seed, gap in gaps.items()}
            largest = float(mean[np.abs(mean).argmax()])
            within = f"{int((np.abs(mean) <= 0.04).sum())} of {len(mean)}"
            cells += [Cell.over(over_layers), tests[line.label].in_words, largest, within]
        elif baseline is None:
            cells += [no_run(f"{group.name} MHA, analysed"), "", "", ""]
        else:
            cells += ["", "", "", ""]
        yield Row.of(line.label, *cells, block=group.name)
