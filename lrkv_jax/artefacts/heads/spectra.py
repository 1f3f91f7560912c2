"""Eigenvalues of the heads' Gram matrices at three depths, and what they add up to."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from lrkv_jax.artefacts.artefact import Artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.heads.analysed import Group, draw_line, pictures
from lrkv_jax.artefacts.heads.ranks import cap
from lrkv_jax.artefacts.looks import GREY

_REFERENCE = {"color": GREY, "ls": (0, (1, 1)), "lw": 1.2, "label": "orthogonal heads"}


def draw_spectra(group: Group, centring: str, title: str) -> Picture:
    """Eigenvalues of query–key forms' cosines against their rank, largest first."""
    figure, axes = _at_depths(group, centring, "spectrum")
    most = cap(group, centring)
    for axis in axes:
        axis.plot(_components(group), [1.0] * most + [0.0] * (group.heads - most), **_REFERENCE)
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


def draw_cumulative(group: Group) -> Picture:
    """Share of the centred total in the first components, with 90 % marked."""
    figure, axes = _at_depths(group, "centred", "cumulative", scale=100.0)
    most = cap(group, "centred")
    for axis in axes:
        places = _components(group)
        axis.plot(places, 100 * np.minimum(places / max(1, most), 1.0), **_REFERENCE)
        axis.axhline(90, color="black", lw=1.0, ls="--", label="90 %")
        axis.set_ylim(0, 104)
    axes[0].set_ylabel("cumulative share, % of variance")
    legend_below(figure, 7)
    needed = "; ".join(
        f"{line.label} " + ", ".join(f"{n:g}" for n in _needed(line, group)) for line in group.lines
    )
    return Picture(
        "Cumulative variance of heads", figure,
        f"Query–key forms less their mean: {most} components hold all there is. Components for "
        f"90 % at {', '.join(group.depths)} layers: {needed}. {group.seeds}",
    )  # fmt: skip


def _needed(line, group: Group) -> np.ndarray:
    mean, _ = line.over_seeds(
        lambda a: [
            a["query_key"]["per_layer"][place]["centred"]["components_90"]
            for place in group.depths.values()
        ]
    )
    return mean.round(1)


def _at_depths(group: Group, centring: str, curve: str, *, scale: float = 1.0):
    figure, rows = panels(1, len(group.depths), panel=(3.1, 3.0), sharey=True)
    for axis, (depth, place) in zip(rows[0], group.depths.items(), strict=True):
        for line in group.lines:
            draw_line(
                axis, _components(group), line,
                lambda a, at=place: scale
                * np.array(a["query_key"]["per_layer"][at][centring][curve]),
            )  # fmt: skip
        axis.set_title(group.depth_title(depth))
        axis.set_xlabel("component")
        axis.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    return figure, rows[0]


def _components(group: Group) -> np.ndarray:
    return np.arange(1, group.heads + 1)


PCA = Artefact(
    "fig10_pca_spectra", "PCA spectra of heads", "Figures 10 and 11",
    lambda runs: pictures(runs, lambda g: draw_spectra(g, "centred", "PCA spectra of heads")),
)  # fmt: skip
CUMULATIVE = Artefact(
    "fig12_cumulative_variance", "Cumulative variance of heads", "Figures 12 and 13",
    lambda runs: pictures(runs, draw_cumulative),
)  # fmt: skip
UNCENTRED = Artefact(
    "fig16_uncentred_spectra", "Uncentred spectra of heads", "Figures 16 and 17",
    lambda runs: pictures(
        runs, lambda g: draw_spectra(g, "uncentred", "Uncentred spectra of heads")
    ),
)  # fmt: skip
