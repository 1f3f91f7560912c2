"""Heat maps of the cosines of heads, and how far a variant's mean cosine is from MHA's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps

from lrkv_jax.artefacts.artefact import Artefact
from lrkv_jax.artefacts.figure import Picture, empty, legend_below, panels
from lrkv_jax.artefacts.heads.analysed import (
    FORMS,
    Group,
    Line,
    groups,
    layer_axis,
    mean_and_sd,
    pictures,
)
from lrkv_jax.artefacts.looks import GREY
from lrkv_jax.artefacts.printed import printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table, no_run
from lrkv_jax.comparison import RunRecord, against

_WRITTEN = 8  # heads, up to which a cell's value is written in it
_LEAST = 0.1  # the least range of the colours, so that rounding is not painted


def draw_maps(group: Group) -> Picture:
    """A row for each variant, a column for an early, a middle and a late layer."""
    figure, axes = panels(len(group.lines), len(group.depths), panel=(2.15, 2.15))
    if group.heads == 1:
        for axis in (axis for row in axes for axis in row):
            empty(axis, "one head:\nnothing to compare")
        return Picture("Similarity of heads", figure)
    grams = [
        [_off_diagonal(line.first, place) for place in group.depths.values()]
        for line in group.lines
    ]
    low = min(0.0, min(gram.min() for row in grams for gram in row))
    high = max(low + _LEAST, max(gram.max() for row in grams for gram in row))
    colours = colormaps["cividis"].with_extremes(bad="#FFFFFF")
    for y, line in enumerate(group.lines):
        for x, depth in enumerate(group.depths):
            axis, gram = axes[y][x], grams[y][x]
            image = axis.imshow(gram, cmap=colours, vmin=low, vmax=high, origin="upper")
            _head_ticks(axis, group.heads, outer=(x == 0, y == len(grams) - 1))
            title = f"mean {gram.mean():.3f}".replace("-", "−")
            axis.set_title(f"{group.depth_title(depth)}\n{title}" if y == 0 else title, fontsize=8)
            if x == 0:
                axis.set_ylabel(f"{line.label}\nhead", fontsize=9)
            if group.heads <= _WRITTEN:
                _write(axis, gram, (low, high))
    bar = figure.colorbar(
        image, ax=[axis for row in axes for axis in row], fraction=0.05, aspect=40, pad=0.02
    )
    bar.set_label("cosine of two heads' forms")
    return Picture(
        "Similarity of heads", figure,
        "Cosines of query–key forms A_h = W^Q_h (W^K_h)ᵀ at the lowest seed of each variant "
        f"({', '.join(f'{line.label}: {min(line.runs)}' for line in group.lines)}). The diagonal, "
        "1 in each, is left white; one scale of colours for all panels, lighter is more alike.",
    )  # fmt: skip


def _off_diagonal(analysis, layer) -> np.ma.MaskedArray:
    gram = np.array(analysis["query_key"]["per_layer"][layer]["gram"])
    return np.ma.masked_array(gram, np.eye(len(gram), dtype=bool))


def _head_ticks(axis, heads, outer) -> None:
    axis.grid(False)
    every = 1 if heads <= _WRITTEN else int(np.ceil(heads / 6))
    ticks = np.arange(0, heads, every)
    for one, shown in ((axis.yaxis, outer[0]), (axis.xaxis, outer[1])):
        one.set_ticks(ticks, [str(tick + 1) for tick in ticks] if shown else [""] * len(ticks))
        one.set_tick_params(labelsize=7, length=2)
    if outer[1]:
        axis.set_xlabel("head")


def _write(axis, gram, limits) -> None:
    low, high = limits
    for (y, x), value in np.ndenumerate(gram.filled(np.nan)):
        if x != y:
            text = f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")
            dark = (value - low) / (high - low) < 0.55
            axis.text(
                x, y, "0" if text in (".00", "−.00") else text, ha="center", va="center",
                fontsize=6.5, color="white" if dark else "black", in_layout=False,
            )  # fmt: skip


MAPS = Artefact(
    "fig06_head_similarity", "Similarity of heads", "Figures 6 and 18",
    lambda runs: pictures(runs, draw_maps),
)  # fmt: skip


def gaps_by_layer(line: Line, baseline: Line | None, form: str) -> dict[int, np.ndarray]:
    """Mean off-diagonal cosine by layer, less the baseline's of the same seed; by seed."""
    if baseline is None or len(line.first[form]["per_layer"][0]["gram"]) == 1:
        return {}
    ours, theirs = (one.each(lambda a: _means(a, form)) for one in (line, baseline))
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def _means(analysis, form) -> np.ndarray:
    return np.array([layer["mean_off_diagonal"] for layer in analysis[form]["per_layer"]])


def _baseline(group: Group) -> Line | None:
    return next(iter(group.of("mha")), None)


def draw_gap(group: Group) -> Picture:
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
            axis.plot(
                places, mean, label=line.label, markevery=max(1, group.layers // 12),
                **line.look.style,
            )  # fmt: skip
            if sd is not None:
                axis.fill_between(
                    places, mean - sd, mean + sd, color=line.look.colour, alpha=0.15, lw=0
                )
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
        "Mean similarity of heads, less MHA's", figure,
        "Mean off-diagonal cosine by layer, less MHA's of the same seed and layer; bands: one "
        f"standard deviation over seeds. {group.seeds}", gaps=missing,
    )  # fmt: skip


def _noise(baseline: Line, form: str) -> float | None:
    sd = baseline.first[form]["null"]["sd"]["mean_off_diagonal"]
    return None if sd is None else sd * 2**0.5  # of a difference of two


GAP_COLUMNS = [
    Column("variant"),
    Column("mean cosine", digits=4),
    Column("less MHA's", digits=4),
    Column("told apart from MHA"),
    Column("largest gap of a layer", digits=4),
    Column("layers within 0.04", digits=0),
]


def gap_table(runs: Sequence[RunRecord]) -> Table:
    """The gaps of query–key forms as means over layers, tested over seeds."""
    claim = printed("heads", "similarity_gap")
    rows = [row for group in groups(runs)[0] for row in _gap_rows(group)]
    return Table(
        "Mean similarity of heads, less MHA's", GAP_COLUMNS,
        rows or [Row.of(*[no_run("any scale, analysed")] * len(GAP_COLUMNS))],
        notes=[
            "Mean off-diagonal cosine of query–key forms, mean over layers, ± standard deviation "
            "over seeds; told apart by a paired t-test over seeds, p adjusted by Holm. Largest gap "
            "and layers within: of means over seeds. The paper says, without showing it, that "
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
        cells = [Cell.over(means[line.label])]
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


GAP = Artefact(
    "similarity_gap", "Mean similarity of heads, less MHA's", "described, not shown",
    lambda runs: [*pictures(runs, draw_gap), gap_table(runs)],
)  # fmt: skip
