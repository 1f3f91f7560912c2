"""Ranks and spectra of heads: Table 3, Figures 7 and 9 to 17, and the same weighted by text."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lrkv_jax.lab.report.analysed import (
    FORMS,
    MEANS,
    TEXTLESS,
    Group,
    Line,
    cap,
    draw_line,
    groups,
    layer_axis,
    pictures,
)
from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.comparison import RunRecord
from lrkv_jax.lab.report.figure import Picture, legend_below, panels
from lrkv_jax.lab.report.looks import GREY, name_of
from lrkv_jax.lab.report.printed import (
    SCALES,
    Printed,
    paper_scale,
    printed,
    printed_table,
    shipped,
    verdict,
)
from lrkv_jax.lab.report.table import Cell, Column, Row, Table

_UNCENTRED, _CENTRED = "uncentred", "centred (PCA)"
_CHANGE = "centring changes it by, points of cap"
RANK_COLUMNS = [
    Column("variant"),
    Column("count", group=_UNCENTRED),
    Column("% of heads", group=_UNCENTRED, digits=1),
    Column("null", "% of heads", group=_UNCENTRED, digits=1),
    Column("count", group=_CENTRED),
    Column("% of heads", group=_CENTRED, digits=1),
    Column("% of cap", group=_CENTRED, digits=1),
    Column("null", "% of cap", group=_CENTRED, digits=1),
    Column("components for 90 %", group=_CENTRED, digits=1),
    Column("measured", group=_CHANGE, digits=1),
    Column("null", group=_CHANGE, digits=1),
]


@artefact("Table 3", "Effective rank of heads", reads="analyses")
def table03_effective_rank(runs):
    """Effective rank of heads, uncentred and centred.

    Counts, % of heads (the paper's convention), % of the cap that centring leaves, the
    random-weights null, components for 90 %, and what centring changes against cap and null. The
    paper's own values stand in a table of their own, with % of cap recomputed.
    """
    return [*(_rank_table(runs, form) for form in FORMS), _printed_ranks()]


def _rank_table(runs: Sequence[RunRecord], form: str) -> Table:
    """Every analysed label; the paper's value beside one that repeats its setting."""
    found, missing = groups(runs)
    rows = []
    for group in found:
        block = f"{group.name}, {group.heads} heads, cap {100 * cap_share(group.heads):.1f} %"
        rows += [_rank_row(line, form, block) for line in group.every]
        rows += [
            Row.of(
                gap.split(": ", 1)[1].removeprefix(f"{group.name} ").split(",")[0],
                *[Cell(gap=gap)] * (len(RANK_COLUMNS) - 1), block=block,
            )
            for gap in group.gaps
            if not gap.startswith("analysed at")
        ]  # fmt: skip
    gaps = missing or (["no run: any scale"] if not found else [])
    return Table(
        f"Effective rank of heads, {FORMS[form]}", RANK_COLUMNS, rows, missing=gaps,
        notes=[
            "Mean over layers ± standard deviation over seeds. Null: the same variant with random "
            "weights. Cap: H heads less their mean span H − 1 dimensions, so that centring alone "
            "takes 100 / H points of heads from any model. Components: the fewest that hold 90 % "
            "of the centred variance. Query compensation is what centring adds in points of the "
            "cap, over what it adds to random weights: it shows a direction that the heads "
            "have in common, as where they share keys, and that they differ in the others.",
        ],
        name="" if form == "query_key" else form,
    )  # fmt: skip


def cap_share(heads: int) -> float:
    """The largest effective rank of centred heads over their number."""
    return (heads - 1) / heads


def _rank_row(line: Line, form: str, block: str) -> Row:
    beside = {centring: _beside(line, form, centring) for centring in ("uncentred", "centred")}
    null = line.first[form]["null"]["mean"]

    def cell(centring, what, printed=None):
        # None of one head, centred: there is no cap.
        return Cell.over(line.each(lambda a: a[form]["mean"][centring][what]), printed=printed)

    change = line.each(lambda a: a[form]["compensation"]["of_cap"])
    return Row.of(
        line.label,
        cell("uncentred", "effective_rank"),
        cell("uncentred", "percent_of_heads", beside["uncentred"]),
        null["uncentred"]["percent_of_heads"],
        cell("centred", "effective_rank"),
        cell("centred", "percent_of_heads", beside["centred"]),
        cell("centred", "percent_of_cap", _of_cap(beside["centred"], line.first["heads"])),
        null["centred"]["percent_of_cap"],
        cell("centred", "components_90"),
        Cell.over(change),
        line.first[form]["compensation"]["of_cap_null"],
        block=block,
    )


def _beside(line: Line, form: str, centring: str) -> Printed | None:
    run = line.runs[min(line.runs)]
    if form != "query_key":
        return None  # the paper has none
    scale = paper_scale(run, any_size=run.kind == "lrkv")
    kind = f"lrkv_r{run.size}" if run.kind == "lrkv" else run.kind
    return printed("table03", scale, kind, centring) if scale else None


def _of_cap(value: Printed | None, heads: int) -> Printed | None:
    """A printed % of heads as % of the cap, to a digit."""
    if value is None:
        return None
    recomputed = value.value / cap_share(heads)
    return Printed(recomputed, f"{recomputed:.1f}, recomputed", value.verdict)


PRINTED_COLUMNS = [
    Column("variant"),
    Column("uncentred", "% of heads", digits=1),
    Column("PCA", "% of heads", digits=1),
    Column("PCA, recomputed", "% of cap", digits=1),
    Column("change as printed", "points of heads", digits=1),
    Column("of which the cap", "points of heads", digits=1),
    Column("change", "points of cap", digits=1),
]


def _printed_ranks() -> Table:
    """The paper's table, with what it comes to of the cap."""
    rows = []
    for scale, variants in printed_table("table03").items():
        heads = shipped(scale).model.heads
        block = f"{SCALES[scale]}, {heads} heads, cap {100 * cap_share(heads):.1f} %"
        for kind in variants:
            before, after = (printed("table03", scale, kind, what)
                             for what in ("uncentred", "centred"))  # fmt: skip
            of_cap = after.value / cap_share(heads)
            own = after.verdict if after.verdict != verdict("table03") else ""
            rows.append(
                Row.of(
                    Cell(_name(kind), note=own), Cell(before.text), Cell(after.text), of_cap,
                    after.value - before.value, -100 / heads, of_cap - before.value, block=block,
                )
            )  # fmt: skip
    return Table(
        "The paper's effective ranks, printed", PRINTED_COLUMNS, rows,
        notes=[verdict("table03")], name="printed",
    )  # fmt: skip


def _name(kind: str) -> str:
    kind, _, rank = kind.partition("_r")
    return name_of(kind) + (f", rank {rank}" if rank else "")


WEIGHTED_TITLE = "Effective rank of heads, weighted by held-out text"
_VIEWS = {"uncentred": "uncentred, % of H", "centred": "centred, % of H − 1"}
WEIGHTED_COLUMNS = [
    Column("variant"),
    *(
        Column(name, digits=1, group=group)
        for group in _VIEWS.values()
        for name in ("plain", "weighted", "random weights, weighted")
    ),
    Column("mean cosine of two heads, weighted"),
]


@artefact("Beside the paper", WEIGHTED_TITLE, reads="analyses")
def weighted_ranks(runs):
    """Effective ranks of heads as held-out text meets them, and random weights'.

    An input direction counts as often as it occurs. Needs `lrkv analyze RUN... --batches 4`.
    """
    found, missing = groups(runs)
    rows = [row for group in found for form in FORMS for row in _block(group, form)]
    gaps = [] if rows else missing or ([TEXTLESS] if found else ["no run: any scale"])
    return Table(
        WEIGHTED_TITLE, WEIGHTED_COLUMNS, rows, missing=gaps,
        notes=[
            "Means over layers ± standard deviation over seeds. Weighted: forms meet inputs with "
            "the second moment C of the layer's own inputs on held-out text, ⟨A, A'⟩ = "
            "tr(Aᵀ C A' C). Random weights meet the same inputs; ± is the deviation of a mean over "
            "as many layers.",
        ],
    )  # fmt: skip


def _block(group: Group, form: str) -> list[Row]:
    lines = [line for line in group.every if all(line.each(lambda a: a.get("weighted")).values())]
    return [_weighted_row(line, form, f"{group.name}, {FORMS[form]}") for line in lines]


def _weighted_row(line: Line, form: str, block: str) -> Row:
    cells = [cell for view in _VIEWS for cell in _ranks(line, form, view)]
    cosines = line.each(lambda a: a["weighted"][form]["mean"]["mean_off_diagonal"])
    return Row.of(line.label, *cells, _over(cosines), block=block)


def _ranks(line: Line, form: str, view: str) -> list[Cell]:
    """Plain, weighted, and of random weights."""
    return [
        _over(line.each(lambda a: a[form]["mean"][view]["percent_of_cap"])),
        _over(line.each(lambda a: a["weighted"][form]["mean"][view]["percent_of_cap"])),
        _random(line.first["weighted"][form]["null"], view),
    ]


def _over(seeds: dict[int, float | None]) -> Cell:
    # One head has no rank once centred, and no other head.
    return Cell.over(seeds, gap="one head" if None in seeds.values() else "")


def _random(null: dict, view: str) -> Cell:
    mean, sd = (null[what][view]["percent_of_cap"] for what in ("mean", "sd_of_mean"))
    if mean is None:
        return Cell(gap="one head")
    return Cell(f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}")


BAR_TITLE = "Effective rank of heads"


@artefact("Figures 7 and 9", BAR_TITLE, reads="analyses")
def fig07_effective_rank(runs):
    """Effective rank of heads, uncentred and centred, as bars.

    Each bar is a mean over layers and seeds, beside random weights and under the cap.
    """
    return pictures(runs, BAR_TITLE, _bar_picture)


def _bar_picture(group: Group) -> Picture:
    """A bar for each variant beside its random-weights null, under the cap."""
    names = [line.label.replace(" rope", "\nrope") for line in group.every]
    width = max(3.2, 0.85 * len(names) + 0.7)
    # One below the other: beside one another they would be too wide for a page.
    figure, axes = panels(len(FORMS) * len(MEANS), panel=(width, 2.4))
    shown = [(form, centring) for form in FORMS for centring in MEANS]
    for [axis], (form, centring) in zip(axes, shown, strict=True):
        _bars(axis, group, form, centring)
        axis.set_title(f"{FORMS[form]}, {MEANS[centring]}")
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.tick_params(axis="x", length=0)
        axis.grid(axis="x", visible=False)
        axis.set_ylabel(f"rank, of {group.heads} heads")
    legend_below(figure)
    return Picture(
        BAR_TITLE, figure,
        "exp of the entropy of the Gram matrix's eigenvalues, mean over layers; the error bar is "
        f"one standard deviation over seeds. {group.seeds} Above each bar: % of "
        f"H = {group.heads} heads, the paper's convention, and % of the cap: heads less their mean "
        f"span {group.heads - 1} dimensions at most.",
    )  # fmt: skip


def _bars(axis, group: Group, form: str, centring: str) -> None:
    most = cap(group, centring)
    for x, line in enumerate(group.every):
        mean, sd = line.over_seeds(lambda a: a[form]["mean"][centring]["effective_rank"])
        axis.bar(x - 0.12, mean, 0.5, yerr=sd, color=line.look.colour, capsize=3, ecolor="black")
        null = line.first[form]["null"]
        axis.bar(
            x + 0.26, null["mean"][centring]["effective_rank"], 0.18,
            yerr=null["sd_of_mean"][centring]["effective_rank"], facecolor="white",
            edgecolor="black", hatch="/////", lw=0.7, label="random weights (null)",
        )  # fmt: skip
        text = f"{100 * mean / group.heads:.1f} % of H"
        if most not in (0, group.heads):
            text += f"\n{100 * mean / most:.1f} % of cap"
        axis.text(x, most + 0.02 * group.heads, text, ha="center", va="bottom", fontsize=6.5)
    axis.axhline(most, color="black", lw=1.0, ls="--", label="cap")
    axis.set_ylim(0, group.heads * 1.22)
    axis.set_xlim(-0.6, len(group.every) - 0.4)


LAYER_TITLE = "Effective rank of heads by layer"


@artefact("Figures 14 and 15", LAYER_TITLE, reads="analyses")
def fig14_rank_by_layer(runs):
    """Effective rank of heads by layer, uncentred beside centred.

    Lines are means over seeds, between the cap and the effective rank of random weights.
    """
    return pictures(runs, LAYER_TITLE, _layer_picture)


def _layer_picture(group: Group) -> Picture:
    figure, axes = panels(len(FORMS), len(MEANS), panel=(4.2, 2.8), sharex=True)
    for row, (form, title) in zip(axes, FORMS.items(), strict=True):
        for axis, (centring, name) in zip(row, MEANS.items(), strict=True):
            places = layer_axis(axis, group.layers, label=row is axes[-1])
            for line in group.lines:
                draw_line(
                    axis, places, line,
                    lambda a, form=form, centring=centring: [
                        layer[centring]["effective_rank"] for layer in a[form]["per_layer"]
                    ],
                )  # fmt: skip
            axis.axhspan(
                *_null_range(group, form, centring), color=GREY, alpha=0.35, lw=0,
                label="random weights (null), ±1 sd of a layer",
            )  # fmt: skip
            axis.axhline(cap(group, centring), color="black", lw=1.0, ls="--", label="cap")
            axis.set_title(f"{title}, {name}")
        row[0].set_ylabel(f"effective rank, of {group.heads} heads")
    legend_below(figure, 7)
    return Picture(
        LAYER_TITLE, figure,
        f"{group.seeds} Bands: one standard deviation over seeds. The null's band holds all "
        "variants'. The axes do not begin at zero, and the caps of the two columns differ by one.",
    )  # fmt: skip


def _null_range(group: Group, form: str, centring: str) -> tuple[float, float]:
    """From the lowest to the highest null of the variants, each ± its standard deviation."""
    lows, highs = [], []
    for line in group.lines:
        null = line.first[form]["null"]
        mean, sd = (null[which][centring]["effective_rank"] for which in ("mean", "sd"))
        lows.append(mean - (sd or 0.0))
        highs.append(mean + (sd or 0.0))
    return float(np.min(lows)), float(np.max(highs))


ORTHOGONAL = {"color": GREY, "ls": (0, (1, 1)), "lw": 1.2, "label": "orthogonal heads"}
BELOW = (
    "Below: the distance from orthogonal heads on a logarithmic axis, the mean over seeds of the "
    "absolute difference; a distance of zero has no point there. Its band reaches one standard "
    "deviation above the mean, and as far below it on this axis."
)
_NOTHING = 1e-9  # of the curve's unit, a distance that is rounding


def draw_spectra(group: Group, centring: str, title: str) -> Picture:
    """Eigenvalues of query–key forms' cosines against their rank, largest first."""
    most = cap(group, centring)
    orthogonal_H = np.array([1.0] * most + [0.0] * (group.heads - most))
    figure, (above, below) = at_depths(group, centring, "spectrum", orthogonal_H)
    for axis in above:
        axis.set_ylim(bottom=0)
    above[0].set_ylabel("eigenvalue of the cosines' Gram")
    below[0].set_ylabel("distance from orthogonal")
    legend_below(figure, 7)
    kind = "the Gram matrix" if centring == "uncentred" else "the Gram matrix less its mean"
    cut = f", of which the last is 0: centring leaves {most}" if most < group.heads else ""
    return Picture(
        title, figure,
        f"Above: eigenvalues of {kind} of query–key forms' cosines, {group.heads} of them{cut}. "
        f"Heads that have nothing in common have eigenvalues of 1. {BELOW} A line dips where its "
        f"eigenvalues pass from above 1 to below. {group.seeds} Bands: one standard deviation over "
        "seeds.",
    )  # fmt: skip


def at_depths(
    group: Group, centring: str, curve: str, orthogonal_H: np.ndarray, *, scale: float = 1.0
) -> tuple[Figure, list[list[Axes]]]:
    """Draw a curve of each line at an early, a middle and a late layer, `scale` times as large.

    Returns the figure and two rows of its axes: the curves with that of orthogonal heads, and their
    distances from it on a logarithmic axis.
    """
    figure, rows = panels(2, len(group.depths), panel=(3.1, 2.6), sharey="row", sharex=True)
    places = components(group)
    for above, below, (depth, place) in zip(*rows, group.depths.items(), strict=True):

        def values(analysis, at=place):
            return scale * np.array(analysis["query_key"]["per_layer"][at][centring][curve])

        def distance(analysis, of=values):
            far_H = np.abs(of(analysis) - orthogonal_H)
            return np.where(far_H > _NOTHING, far_H, np.nan)

        for line in group.lines:
            draw_line(above, places, line, values)
            draw_line(below, places, line, distance, log=True)
        below.set_yscale("log", nonpositive="clip")
        above.plot(places, orthogonal_H, **ORTHOGONAL)
        above.set_title(group.depth_title(depth))
        below.set_xlabel("component")
        below.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    return figure, rows


def components(group: Group) -> np.ndarray:
    """The numbers of the components, from 1."""
    return np.arange(1, group.heads + 1)


PCA_SPECTRA = "PCA spectra of heads"


@artefact("Figures 10 and 11", PCA_SPECTRA, reads="analyses")
def fig10_pca_spectra(runs):
    """Centred (PCA) spectra of heads at an early, a middle and a late layer.

    Lines are means over seeds, with orthogonal heads beside them; below, their distance from those
    on a logarithmic axis.
    """
    return pictures(runs, PCA_SPECTRA, lambda group: draw_spectra(group, "centred", PCA_SPECTRA))


UNCENTRED_SPECTRA = "Uncentred spectra of heads"


@artefact("Figures 16 and 17", UNCENTRED_SPECTRA, reads="analyses")
def fig16_uncentred_spectra(runs):
    """Uncentred spectra of heads at an early, a middle and a late layer.

    Lines are means over seeds, with orthogonal heads beside them; below, their distance from those
    on a logarithmic axis.
    """
    return pictures(
        runs, UNCENTRED_SPECTRA, lambda group: draw_spectra(group, "uncentred", UNCENTRED_SPECTRA)
    )


VARIANCE_TITLE = "Cumulative variance of heads"


@artefact("Figures 12 and 13", VARIANCE_TITLE, reads="analyses")
def fig12_cumulative_variance(runs):
    """Cumulative variance of heads at an early, a middle and a late layer.

    Lines are means over seeds, with 90 % and orthogonal heads beside them; below, their distance
    from those heads on a logarithmic axis.
    """
    return pictures(runs, VARIANCE_TITLE, _variance_picture)


def _variance_picture(group: Group) -> Picture:
    """Draw the share of the centred total in the first components, with 90 % marked."""
    most = cap(group, "centred")
    orthogonal_H = 100 * np.minimum(components(group) / max(1, most), 1.0)
    figure, (above, below) = at_depths(group, "centred", "cumulative", orthogonal_H, scale=100.0)
    for axis in above:
        axis.axhline(90, color="black", lw=1.0, ls="--", label="90 %")
        axis.set_ylim(0, 104)
    above[0].set_ylabel("cumulative share, % of variance")
    below[0].set_ylabel("distance from orthogonal, points")
    legend_below(figure, 7)
    needed = "; ".join(
        f"{line.label} " + ", ".join(f"{n:g}" for n in _needed(line, group)) for line in group.lines
    )
    return Picture(
        VARIANCE_TITLE, figure,
        f"Above: query–key forms less their mean: {most} components hold all there is. Components "
        f"for 90 % at {', '.join(group.depths)} layers: {needed}. {BELOW} {group.seeds} "
        "Bands: one standard deviation over seeds.",
    )  # fmt: skip


def _needed(line, group: Group) -> np.ndarray:
    mean, _ = line.over_seeds(
        lambda a: [
            a["query_key"]["per_layer"][place]["centred"]["components_90"]
            for place in group.depths.values()
        ]
    )
    return mean.round(1)
