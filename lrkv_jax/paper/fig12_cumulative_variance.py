"""Figures 12 and 13: cumulative variance of heads at an early, a middle and a late layer.

Lines are means over seeds, with 90 % and orthogonal heads beside them; below, their distance from
those heads on a logarithmic axis.
"""

import numpy as np

from lrkv_jax.artefacts.analysed import Group, cap, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below
from lrkv_jax.artefacts.spectra import BELOW, at_depths, components

TITLE = "Cumulative variance of heads"


@artefact("Figures 12 and 13", TITLE, reads="analyses")
def fig12_cumulative_variance(runs):
    return pictures(runs, TITLE, _picture)


def _picture(group: Group) -> Picture:
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
        TITLE, figure,
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
