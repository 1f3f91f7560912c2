"""Effective ranks of heads, with and without their mean: bars, and by layer."""

from __future__ import annotations

import numpy as np

from lrkv_jax.artefacts.artefact import Artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.heads.analysed import FORMS, Group, draw_line, layer_axis, pictures
from lrkv_jax.artefacts.looks import GREY

MEANS = {"uncentred": "uncentred", "centred": "centred (PCA)"}


def cap(group: Group, centring: str) -> int:
    """The largest effective rank that there can be."""
    return group.heads if centring == "uncentred" else group.heads - 1


def draw_bars(group: Group) -> Picture:
    """A bar for each variant beside its random-weights null, under the cap."""
    names = [line.label.replace(" rope", "\nrope") for line in group.every]
    width = max(3.2, 0.85 * len(names) + 0.7)
    figure, axes = panels(len(FORMS), len(MEANS), panel=(width, 2.7))
    for row, (form, title) in zip(axes, FORMS.items(), strict=True):
        for axis, (centring, name) in zip(row, MEANS.items(), strict=True):
            _bars(axis, group, form, centring)
            axis.set_title(f"{title}, {name}")
            axis.set_xticks(range(len(names)), names, fontsize=8)
            axis.tick_params(axis="x", length=0)
            axis.grid(axis="x", visible=False)
        row[0].set_ylabel(f"effective rank, of {group.heads} heads")
    legend_below(figure)
    return Picture(
        "Effective rank of heads", figure,
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


BARS = Artefact(
    "fig07_effective_rank", "Effective rank of heads", "Figures 7 and 9",
    lambda runs: pictures(runs, draw_bars),
)  # fmt: skip


def draw_by_layer(group: Group) -> Picture:
    """A line for each variant, between the cap and what random weights come to."""
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
                label="random weights (null), a layer's ±1 sd",
            )  # fmt: skip
            axis.axhline(cap(group, centring), color="black", lw=1.0, ls="--", label="cap")
            axis.set_title(f"{title}, {name}")
        row[0].set_ylabel(f"effective rank, of {group.heads} heads")
    legend_below(figure, 7)
    return Picture(
        "Effective rank of heads by layer", figure,
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


BY_LAYER = Artefact(
    "fig14_rank_by_layer", "Effective rank of heads by layer", "Figures 14 and 15",
    lambda runs: pictures(runs, draw_by_layer),
)  # fmt: skip
