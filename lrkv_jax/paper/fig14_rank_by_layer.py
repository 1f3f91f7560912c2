"""Figures 14 and 15: effective rank of heads by layer, uncentred beside centred.

Lines are means over seeds, between the cap and the effective rank of random weights.
"""

import numpy as np

from lrkv_jax.artefacts.analysed import FORMS, MEANS, Group, cap, draw_line, layer_axis, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import GREY

TITLE = "Effective rank of heads by layer"


@artefact("Figures 14 and 15", TITLE, reads="analyses")
def fig14_rank_by_layer(runs):
    return pictures(runs, TITLE, _picture)


def _picture(group: Group) -> Picture:
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
        TITLE, figure,
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
