"""Eigenvalues of the heads' Gram matrices at three depths, their cumulative sums, and how far both
are from those of orthogonal heads."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lrkv_jax.artefacts.analysed import Group, cap, draw_line
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import GREY

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
