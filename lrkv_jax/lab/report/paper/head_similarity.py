"""How alike heads are: Figures 6 and 18, and what the paper describes alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps

from lrkv_jax.files import read_json
from lrkv_jax.lab.report.analysed import FORMS, TEXTLESS, Group, Line, groups, layer_axis, pictures
from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.comparison import RunRecord, against, settings
from lrkv_jax.lab.report.figure import Picture, draw_mean, empty, legend_below, mean_and_sd, panels
from lrkv_jax.lab.report.looks import GREY
from lrkv_jax.lab.report.losses import looks_beside
from lrkv_jax.lab.report.printed import printed
from lrkv_jax.lab.report.table import Cell, Column, Row, Table, no_run

MAP_TITLE = "Similarity of heads"
_WRITTEN = 8  # heads, up to which a cell's value is written in it
_LEAST = 0.1  # the least range of the colours, so that rounding is not painted


@artefact("Figures 6 and 18", MAP_TITLE, reads="analyses")
def fig06_head_similarity(runs):
    """Heat maps of the cosines of heads at an early, a middle and a late layer.

    Two pictures for each scale: of heads' forms, as in the paper, and of their logits on held-out
    text, which needs `lrkv analyze RUN... --batches 4`. A row for each variant at its lowest seed,
    one scale of colours in each picture.
    """
    return pictures(runs, MAP_TITLE, _pictures)


def _pictures(group: Group) -> list[Picture]:
    """The maps of forms, and those of logits."""
    if group.heads == 1:
        return [Picture(MAP_TITLE, None, gaps=[f"one head, nothing to compare: {group.name}"])]
    seeds = ", ".join(f"{line.label}: {min(line.runs)}" for line in group.lines)
    forms = _maps(group, lambda analysis: analysis["query_key"], "cosine of two heads' forms")
    forms.caption = (
        "Cosines of query–key forms A_h = W^Q_h (W^K_h)ᵀ at the lowest seed of each variant "
        f"({seeds}). The diagonal, 1 in each, is left white; one scale of colours for all panels, "
        "lighter is more alike."
    )
    logits = _maps(group, lambda analysis: analysis.get("logits"), "cosine of two heads' logits")
    logits.title, logits.name = "Similarity of heads' logits on held-out text", "logits"
    logits.caption = (
        "The same heads by what softmax sees: cosines of their logits on held-out text, with RoPE "
        "and QK-norm, over all pairs of a query and a key that it may attend to, each query's "
        "logits less their mean. The mean of a panel is over pairs of different heads. The colours "
        "are not those of the forms."
    )
    return [forms, logits]


def _maps(group: Group, of: Callable[[dict], dict | None], name: str) -> Picture:
    """A row for each variant, a column for an early, a middle and a late layer.

    `of` gives what has `per_layer` grams, or None of runs that were analysed without.
    """
    found = [(line, of(line.first)) for line in group.lines]
    gaps = [f"{TEXTLESS}: {group.name} {line.label}" for line, has in found if not has]
    if len(gaps) == len(found):
        return Picture(MAP_TITLE, None, gaps=gaps)
    figure, axes = panels(len(found), len(group.depths), panel=(2.15, 2.15))
    grams = [
        [_off_diagonal(has["per_layer"][place]) for place in group.depths.values()] if has else []
        for _, has in found
    ]
    low = min(0.0, min(gram.min() for row in grams for gram in row))
    high = max(low + _LEAST, max(gram.max() for row in grams for gram in row))
    colours = colormaps["cividis"].with_extremes(bad="#FFFFFF")
    for y, line in enumerate(group.lines):
        for x, depth in enumerate(group.depths):
            axis, title = axes[y][x], "analysed without text"
            if not grams[y]:
                empty(axis, title)
            else:
                gram = grams[y][x]
                image = axis.imshow(gram, cmap=colours, vmin=low, vmax=high, origin="upper")
                _head_ticks(axis, group.heads, outer=(x == 0, y == len(grams) - 1))
                title = f"mean {gram.mean():.3f}".replace("-", "−")
                if group.heads <= _WRITTEN:
                    _write(axis, gram, (low, high))
            axis.set_title(f"{group.depth_title(depth)}\n{title}" if y == 0 else title, fontsize=8)
            if x == 0:
                axis.set_ylabel(f"{line.label}\nhead", fontsize=9)
    bar = figure.colorbar(
        image, ax=[axis for row in axes for axis in row], fraction=0.05, aspect=40, pad=0.02
    )
    bar.set_label(name)
    return Picture(MAP_TITLE, figure, gaps=gaps)


def _off_diagonal(layer) -> np.ma.MaskedArray:
    gram = np.array(layer["gram"])
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


GAP_TITLE = "Mean similarity of heads, less MHA's"


@artefact("Described, not shown", GAP_TITLE, reads="analyses")
def similarity_gap(runs):
    """Mean similarity of heads by layer, each variant less MHA.

    The paper puts LRKV within 0.02 to 0.04 of MHA; the noise of random layers is drawn beside it.
    """
    return [*pictures(runs, GAP_TITLE, _picture), _table(runs)]


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
        GAP_TITLE, figure,
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
        GAP_TITLE, COLUMNS, rows, missing=[] if rows else ["no run: any scale, analysed"],
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


EVOLUTION_TITLE = "How heads came to differ"
RANK = "effective rank, % of its cap"
# A panel: its title, its unit, and where the value stands in one step's analysis.
PANELS = (
    ("query-key forms", RANK, ("query_key", "centred", "percent_of_cap")),
    ("value-output forms", RANK, ("value_output", "centred", "percent_of_cap")),
    ("key residuals", "‖U Bᵀ‖ / ‖W shared‖", ("magnitude", "key")),
)


@artefact("Beside the paper", EVOLUTION_TITLE, reads="analyses")
def evolution(runs):
    """How heads came to differ, over the checkpoints that a run still has.

    It reads `analysis_steps.json` in each run's directory, which `lrkv analyze --steps` writes.
    """
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
        return Picture(EVOLUTION_TITLE, None, gaps=gaps or ["no analysis of steps: any scale"])
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
        EVOLUTION_TITLE, figure,
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
