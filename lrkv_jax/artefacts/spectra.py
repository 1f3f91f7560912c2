"""Eigenvalues of the heads' Gram matrices at three depths, and their cumulative sums."""

import numpy as np
from matplotlib.ticker import MaxNLocator

from lrkv_jax.artefacts.analysed import Group, cap, draw_line
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import GREY

ORTHOGONAL = {"color": GREY, "ls": (0, (1, 1)), "lw": 1.2, "label": "orthogonal heads"}


def draw_spectra(group: Group, centring: str, title: str) -> Picture:
    """Eigenvalues of query–key forms' cosines against their rank, largest first."""
    figure, axes = at_depths(group, centring, "spectrum")
    most = cap(group, centring)
    for axis in axes:
        axis.plot(components(group), [1.0] * most + [0.0] * (group.heads - most), **ORTHOGONAL)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("eigenvalue of the cosines' Gram")
    legend_below(figure, 7)
    kind = "the Gram matrix" if centring == "uncentred" else "the Gram matrix less its mean"
    cut = f", of which the last is 0: centring leaves {most}" if most < group.heads else ""
    return Picture(
        title, figure,
        f"Eigenvalues of {kind} of query–key forms' cosines, {group.heads} of them{cut}. Heads "
        f"that have nothing in common have eigenvalues of 1. {group.seeds} Bands: one standard "
        "deviation over seeds.",
    )  # fmt: skip


def at_depths(group: Group, centring: str, curve: str, *, scale: float = 1.0):
    """Draw a curve of each line at an early, a middle and a late layer; (figure, axes)."""
    figure, rows = panels(1, len(group.depths), panel=(3.1, 3.0), sharey=True)
    for axis, (depth, place) in zip(rows[0], group.depths.items(), strict=True):
        for line in group.lines:
            draw_line(
                axis, components(group), line,
                lambda a, at=place: scale
                * np.array(a["query_key"]["per_layer"][at][centring][curve]),
            )  # fmt: skip
        axis.set_title(group.depth_title(depth))
        axis.set_xlabel("component")
        axis.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    return figure, rows[0]


def components(group: Group) -> np.ndarray:
    """The numbers of the components, from 1."""
    return np.arange(1, group.heads + 1)
