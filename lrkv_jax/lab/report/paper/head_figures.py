"""Figures of analyzed heads: Figures 6 to 18."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lrkv_jax.lab.report.analyzed import (
    FAMILIES,
    FORMS,
    VIEWS,
    AnalyzedSetting,
    AnalyzedVariant,
    draw_variant,
    layer_axis,
    pictures,
)
from lrkv_jax.lab.report.comparison.contrasts import mean_and_sd
from lrkv_jax.lab.report.figures import Picture, legend_below, panels
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper_values import paper_value
from lrkv_jax.lab.report.styles import GRAY

_WRITTEN = 8  # heads, up to which a cell's value is written in it
_LEAST = 0.1  # the least range of the colors, so that rounding is not painted
FORMS_NOTE = (
    "Cosines of query–key forms A_h = W^Q_h (W^K_h)ᵀ at the lowest seed of each variant. The "
    "diagonal, 1 in each, is left white; one scale of colors for all panels, lighter is more alike."
)
LOGITS_NOTE = (
    "The same heads by what softmax sees: cosines of their logits on held-out text, with RoPE and "
    "QK-norm, over all pairs of a query and a key that it may attend to, each query's logits less "
    "their mean. The mean of a panel is over pairs of different heads. The colors are not those of "
    "the forms."
)


@report_item("Figures 6 and 18", "Similarity of heads", reads="analyses")
def fig06_head_similarity(runs):
    """Cosines of heads' forms, and of their logits on text (`lrkv analyze RUN... --batches 4`)."""
    forms = pictures(
        runs, lambda setting: _maps("Similarity of heads", setting, "query_key", FORMS_NOTE)
    )
    title = "Similarity of heads' logits on held-out text"
    logits = pictures(runs, lambda setting: _maps(title, setting, "logits", LOGITS_NOTE))
    for picture in logits:
        picture.name = "_".join(filter(None, (picture.name, "logits")))
    return [*forms, *logits]


def _maps(title: str, setting: AnalyzedSetting, what: str, note: str) -> Picture | None:
    """A row for each variant that was analyzed so, a column for each depth."""
    shown = [one for one in setting.variants if one.first.get(what)]
    if not shown or setting.heads == 1:
        return None
    figure, axes = panels(len(shown), len(setting.depths), panel=(2.15, 2.15))
    grams = [
        [_off_diagonal(one.first[what]["per_layer"][place]) for place in setting.depths.values()]
        for one in shown
    ]
    low = min(0.0, np.min([gram.min() for row in grams for gram in row]))
    high = max(low + _LEAST, np.max([gram.max() for row in grams for gram in row]))
    colors = colormaps["cividis"].with_extremes(bad="#FFFFFF")
    for row, variant, of_variant in zip(axes, shown, grams, strict=True):
        for axis, gram in zip(row, of_variant, strict=True):
            image = axis.imshow(gram, cmap=colors, vmin=low, vmax=high, origin="upper")
            axis.set_title(f"mean {gram.mean():.3f}".replace("-", "−"), fontsize=8)
            _head_ticks(axis, setting.heads)
            if setting.heads <= _WRITTEN:
                _write_values(axis, gram, low, high)
        row[0].set_ylabel(f"{variant.label}\nhead", fontsize=9)
    for axis, depth in zip(axes[0], setting.depths, strict=True):
        axis.set_title(f"{depth}\n{axis.get_title()}", fontsize=8)
    every = [axis for row in axes for axis in row]
    bar = figure.colorbar(image, ax=every, fraction=0.05, aspect=40, pad=0.02)
    bar.set_label("cosine of two heads")
    return Picture(title, figure, note)


def _off_diagonal(layer: dict[str, Any]) -> np.ma.MaskedArray:
    gram = np.array(layer["gram"])
    return np.ma.masked_array(gram, np.eye(len(gram), dtype=bool))


def _head_ticks(axis: Axes, heads: int) -> None:
    axis.grid(False)
    ticks = np.arange(0, heads, 1 if heads <= _WRITTEN else int(np.ceil(heads / 6)))
    for one in (axis.xaxis, axis.yaxis):
        one.set_ticks(ticks, [str(tick + 1) for tick in ticks])
        one.set_tick_params(labelsize=7, length=2)


def _write_values(axis: Axes, gram: np.ma.MaskedArray, low: float, high: float) -> None:
    for (y, x), value in np.ndenumerate(gram.filled(np.nan)):
        if x != y:
            color = "white" if (value - low) / (high - low) < 0.55 else "black"
            text = f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")
            axis.text(
                x, y, text, ha="center", va="center", fontsize=6.5, color=color, in_layout=False
            )


@report_item("Figures 7 and 9", "Effective rank of heads", reads="analyses")
def fig07_effective_rank(runs):
    """Effective rank of heads as bars, next to random weights and under the cap."""
    return pictures(runs, _rank_bars)


def _rank_bars(setting: AnalyzedSetting) -> Picture:
    names = [variant.label.replace(" rope", "\nrope") for variant in setting.every]
    shown = [(form, view) for form in FORMS for view in VIEWS]
    # One below the other: side by side they would be too wide for a page.
    figure, axes = panels(len(shown), panel=(max(3.2, 0.85 * len(names) + 0.7), 2.4))
    for [axis], (form, view) in zip(axes, shown, strict=True):
        for x, variant in enumerate(setting.every):
            _rank_bar(axis, x, variant, form, view)
        axis.axhline(setting.cap(view), color="black", lw=1.0, ls="--", label="cap")
        axis.set_title(f"{FORMS[form]}, {VIEWS[view]}")
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.grid(axis="x", visible=False)
        axis.set_ylabel(f"rank, of {setting.heads} heads")
    legend_below(figure)
    return Picture(
        "Effective rank of heads", figure,
        "exp of the entropy of the Gram matrix's eigenvalues, mean over layers; the error bar is "
        f"one standard deviation over seeds. {setting.seeds} Cap: heads less their mean span "
        f"{setting.heads - 1} dimensions at most.",
    )  # fmt: skip


def _rank_bar(axis: Axes, x: int, variant: AnalyzedVariant, form: str, view: str) -> None:
    ranks = variant.each(lambda a: a[form]["mean"][view]["effective_rank"]).values()
    mean, sd = mean_and_sd(ranks)
    axis.bar(x - 0.12, mean, 0.5, yerr=sd, color=variant.style.color, capsize=3, ecolor="black")
    null = variant.first[form]["null"]
    axis.bar(
        x + 0.26, null["mean"][view]["effective_rank"], 0.18,
        yerr=null["sd_of_mean"][view]["effective_rank"], facecolor="white", edgecolor="black",
        hatch="/////", lw=0.7, label="random weights (null)",
    )  # fmt: skip


# LRKV's parts, which also differ without their colors.
PARTS: dict[str, dict[str, Any]] = {
    "shared": {"color": "#E69F00", "linestyle": "--", "marker": "s", "label": "‖W_shared‖"},
    "residual": {"color": "#009E73", "linestyle": ":", "marker": "v", "label": "‖U_h B_hᵀ‖"},
    "total": {
        "color": "#D55E00", "linestyle": "-", "marker": "^", "label": "‖W_shared + U_h B_hᵀ‖",
    },
}  # fmt: skip


@report_item("Figure 8", "Norms of keys and values", reads="analyses")
def fig08_key_norms(runs):
    """Frobenius norms of keys and values by layer: MHA's, and LRKV's total and parts."""
    return pictures(runs, _norms)


def _norms(setting: AnalyzedSetting) -> Picture | None:
    shown = [one for one in setting.variants if one.kind == "lrkv"]
    if not shown:
        return None
    mha = next(iter(setting.of("mha")), None)
    figure, axes = panels(len(shown), len(FAMILIES))
    for row, variant in zip(axes, shown, strict=True):
        for axis, (family, name) in zip(row, FAMILIES.items(), strict=True):
            places = layer_axis(axis, setting.layers)
            times = ""
            if mha:
                draw_variant(axis, places, mha, _norm(family, "total"), label="MHA ‖W_h‖")
                total, of_mha = (one.mean(_norm(family, "total")) for one in (variant, mha))
                low, high = (total / of_mha).min(), (total / of_mha).max()
                times = f": total {low:.2f} to {high:.2f}× MHA's"
            for part, style in PARTS.items():
                if variant.first["magnitude"]["per_layer"][0][family][part] is not None:
                    draw_variant(axis, places, variant, _norm(family, part), **style)
            axis.set_ylim(bottom=0)  # after all lines: it keeps the top as it is
            axis.set_title(f"{variant.label}\n{name}{times}")
        row[0].set_ylabel("Frobenius norm,\nmean over heads")
    legend_below(figure, 4)
    claim = [paper_value("heads", "key_norm", place).text for place in ("results", "discussion")]
    return Picture(
        "Norms of keys and values", figure,
        f"The paper says of LRKV's keys {claim[0]}× MHA's in its results and {claim[1]}× in its "
        "discussion. QK-norm hides the norm of a key from its logits; nothing hides a value's. "
        f"{setting.seeds}",
    )  # fmt: skip


def _norm(family: str, part: str) -> Callable[[dict[str, Any]], list[float]]:
    return lambda a: [layer[family][part] for layer in a["magnitude"]["per_layer"]]


@report_item("Figures 14 and 15", "Effective rank of heads by layer", reads="analyses")
def fig14_rank_by_layer(runs):
    """Effective rank of heads by layer, between the cap and that of random weights."""
    return pictures(runs, _ranks_by_layer)


def _ranks_by_layer(setting: AnalyzedSetting) -> Picture:
    figure, axes = panels(len(FORMS), len(VIEWS), panel=(4.2, 2.8), sharex=True)
    for row, (form, title) in zip(axes, FORMS.items(), strict=True):
        for axis, (view, name) in zip(row, VIEWS.items(), strict=True):
            places = layer_axis(axis, setting.layers)

            def ranks(analysis, form=form, view=view):
                return [layer[view]["effective_rank"] for layer in analysis[form]["per_layer"]]

            for variant in setting.variants:
                draw_variant(axis, places, variant, ranks)
            axis.axhspan(
                *_null_range(setting, form, view), color=GRAY, alpha=0.35, lw=0,
                label="random weights (null), ±1 sd of a layer",
            )  # fmt: skip
            axis.axhline(setting.cap(view), color="black", lw=1.0, ls="--", label="cap")
            axis.set_title(f"{title}, {name}")
        row[0].set_ylabel(f"effective rank, of {setting.heads} heads")
    legend_below(figure, 7)
    return Picture(
        "Effective rank of heads by layer", figure,
        f"{setting.seeds} Bands: one standard deviation over seeds. The null's band holds all "
        "variants'. The axes do not begin at zero, and the caps of the two columns differ by one.",
    )  # fmt: skip


def _null_range(setting: AnalyzedSetting, form: str, view: str) -> tuple[float, float]:
    """From the lowest to the highest null of the variants, each ± its standard deviation."""
    ends = []
    for variant in setting.variants:
        null = variant.first[form]["null"]
        mean, sd = (null[which][view]["effective_rank"] for which in ("mean", "sd"))
        ends += [mean - (sd or 0.0), mean + (sd or 0.0)]
    return min(ends), max(ends)


@report_item("Figures 10 and 11", "PCA spectra of heads", reads="analyses")
def fig10_pca_spectra(runs):
    """Centered (PCA) spectra of heads at an early, a middle and a late layer."""
    return pictures(runs, lambda setting: _spectra(setting, "centred", "PCA spectra of heads"))


@report_item("Figures 16 and 17", "Uncentered spectra of heads", reads="analyses")
def fig16_uncentred_spectra(runs):
    """Uncentered spectra of heads at an early, a middle and a late layer."""
    title = "Uncentered spectra of heads"
    return pictures(runs, lambda setting: _spectra(setting, "uncentred", title))


def _spectra(setting: AnalyzedSetting, view: str, title: str) -> Picture:
    """Eigenvalues of query–key forms' cosines against their rank, largest first."""
    most = setting.cap(view)
    orthogonal_H = np.array([1.0] * most + [0.0] * (setting.heads - most))
    cut = f", of which the last is 0: centering leaves {most}" if view == "centred" else ""
    return _at_depths(
        setting, title, view, "spectrum", orthogonal_H, "eigenvalue of the cosines' Gram",
        f"Eigenvalues of the Gram matrix of query–key forms' cosines, {setting.heads} of "
        f"them{cut}. Heads that have nothing in common have eigenvalues of 1.",
    )  # fmt: skip


@report_item("Figures 12 and 13", "Cumulative variance of heads", reads="analyses")
def fig12_cumulative_variance(runs):
    """Cumulative variance of heads at an early, a middle and a late layer, with 90 % marked."""
    return pictures(runs, _cumulative_variance)


def _cumulative_variance(setting: AnalyzedSetting) -> Picture:
    most = setting.cap("centred")
    orthogonal_H = np.minimum(np.arange(1, setting.heads + 1) / max(1, most), 1.0)
    needed = "; ".join(f"{one.label} {_needed(one, setting)}" for one in setting.variants)
    picture = _at_depths(
        setting, "Cumulative variance of heads", "centred", "cumulative", orthogonal_H,
        "cumulative share of variance",
        f"Query–key forms less their mean: {most} components hold all there is. Components for "
        f"90 % at these layers: {needed}.",
    )  # fmt: skip
    for axis in picture.figure.axes:
        axis.axhline(0.9, color="black", lw=1.0, ls="--")
    return picture


def _needed(variant: AnalyzedVariant, setting: AnalyzedSetting) -> str:
    """The components for 90 % at each depth, in words."""
    counts = variant.mean(
        lambda a: [
            a["query_key"]["per_layer"][place]["centred"]["components_90"]
            for place in setting.depths.values()
        ]
    )
    return ", ".join(f"{count:g}" for count in counts.round(1))


def _at_depths(
    setting: AnalyzedSetting,
    title: str,
    view: str,
    curve: str,
    orthogonal_H: np.ndarray,
    unit: str,
    note: str,
) -> Picture:
    """A panel for each depth: a curve of each variant, and that of orthogonal heads."""
    figure, [axes] = panels(1, len(setting.depths), panel=(3.1, 2.8), sharey=True)
    components = np.arange(1, setting.heads + 1)
    for axis, (depth, place) in zip(axes, setting.depths.items(), strict=True):

        def values(analysis, place=place):
            return analysis["query_key"]["per_layer"][place][view][curve]

        for variant in setting.variants:
            draw_variant(axis, components, variant, values)
        axis.plot(
            components, orthogonal_H, color=GRAY, ls=(0, (1, 1)), lw=1.2, label="orthogonal heads"
        )
        axis.set_ylim(bottom=0)
        axis.set_title(depth)
        axis.set_xlabel("component")
        axis.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes[0].set_ylabel(unit)
    legend_below(figure, 7)
    spread = "Bands: one standard deviation over seeds."
    return Picture(title, figure, f"{note} {setting.seeds} {spread}")
