"""Described in the paper, not shown: how LRKV's residuals lie against its shared part.

Cosines (the paper says 0.2 to 0.4) and principal angles by layer, beside random residuals.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from lrkv_jax.artefacts.analysed import (
    FAMILIES,
    Group,
    Line,
    draw_line,
    groups,
    layer_axis,
    pictures,
)
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import GREY
from lrkv_jax.artefacts.printed import printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import RunRecord

TITLE = "Shared part against residuals"
_STYLES = {
    "key": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    "value": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
}
_DRAWS = 4  # random subspaces of the null; their angles are alike to a degree


@artefact("Described, not shown", TITLE, reads="analyses")
def overlap(runs):
    return [*pictures(runs, TITLE, _pictures), _table(runs)]


def _with_parts(group: Group, *, every: bool = False) -> list[Line]:
    """Its LRKV lines that have residuals."""
    return [
        line
        for line in group.of("lrkv", every=every)
        if line.first["geometry"] and line.first["rank"]
    ]


def _pictures(group: Group) -> list[Picture]:
    """A picture for each LRKV line: cosines, overlap of column spaces, principal angles."""
    lines = _with_parts(group)
    if not lines:
        return [Picture(TITLE, None, gaps=[f"no analysed run: {group.name} LRKV"])]
    many = len(lines) > 1
    return [_picture(group, line, line.label if many else "") for line in lines]


def _picture(group: Group, line: Line, name: str) -> Picture:
    figure, (axes,) = panels(1, 3, panel=(3.7, 3.2))
    places, claim = layer_axis(axes[0], group.layers), printed("heads", "cosine")
    axes[0].set_xlim(0.8, group.layers + 0.2)  # room for what stands aside
    layer_axis(axes[1], group.layers)
    for aside, (family, title) in zip((-0.07, 0.07), FAMILIES.items(), strict=True):
        style: dict[str, Any] = {"label": title} | _STYLES[family]
        draw_line(axes[0], places + aside, line, _by_layer(family, "mean_cosine"), **style)
        spread = np.array([
            layer[family]["cosine"] for layer in line.first["geometry"]["per_layer"]
        ])  # fmt: skip
        low, high = spread.min(1), spread.max(1)
        axes[0].vlines(places + aside, low, high, color=style["color"], lw=1.0, alpha=0.7)
        draw_line(axes[1], places, line, _by_layer(family, "mean_square"), **style)
        angles, _ = line.over_seeds(lambda a, of=family: mean_angles(a, of))
        axes[2].plot(
            np.arange(1, len(angles) + 1), angles, markevery=max(1, len(angles) // 12), **style
        )
    sd = line.first["geometry"]["per_layer"][0]["key"]["cosine_null_sd"]
    axes[0].axhspan(-sd, sd, color=GREY, alpha=0.35, lw=0, label="random residuals, ±1 sd")
    least, most = map(float, claim.text.split("-"))
    axes[0].axhspan(
        least, most, facecolor="none", edgecolor="#AAAAAA", hatch="////", lw=0,
        label=f"the paper's {claim.text}",
    )  # fmt: skip
    null = line.first["geometry"]["per_layer"][0]["key"]["mean_square_null"]
    random = {"color": GREY, "ls": (0, (1, 1)), "lw": 1.6, "label": "random columns"}
    axes[1].axhline(null, **random)
    axes[2].plot(*_random_angles(line.first), **random)
    axes[1].set_ylim(0, 1)
    axes[2].set_ylim(0, 92)
    axes[2].xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes[0].set_title("cosine of W_shared and U_h B_hᵀ")
    axes[1].set_title("overlap of column spaces")
    axes[2].set_title("principal angles of column spaces")
    axes[0].set_ylabel("cosine")
    axes[1].set_ylabel("mean squared cosine of the angles")
    axes[2].set_ylabel("degrees, mean over heads and layers")
    axes[2].set_xlabel("angle, smallest first")
    legend_below(figure, 6)
    about = line.first
    return Picture(
        f"{TITLE}, {line.label}", figure,
        f"Left: lines are means over heads, bars from the lowest head to the highest at seed "
        f"{min(line.runs)}; grey, one standard deviation of random residuals, 1/√(D K). Middle and "
        f"right: the columns of U_h ({about['rank']} dimensions) against those of W_shared "
        f"({about['head_width']}), in {about['width']}; 1 and 0° are within, and grey is random "
        f"columns. {group.seeds}", name=name,
    )  # fmt: skip


def _by_layer(family, what):
    return lambda a: [layer[family][what] for layer in a["geometry"]["per_layer"]]


def mean_angles(analysis, family: str) -> np.ndarray:
    """Principal angles in degrees, smallest first: each one's mean over heads and layers."""
    cosines = [
        head
        for layer in analysis["geometry"]["per_layer"]
        for head in layer[family]["principal_cosines"]
    ]
    # A residual that has lost a direction has an angle fewer.
    fewest = min(map(len, cosines))
    return np.degrees(np.arccos([head[:fewest] for head in cosines])).mean(0)


def _random_angles(analysis) -> tuple[np.ndarray, np.ndarray]:
    """(places, angles) of random subspaces of the same dimensions."""
    rng = np.random.default_rng(0)
    D, K, R = (analysis[name] for name in ("width", "head_width", "rank"))
    # By symmetry the K dimensions may be the first K coordinates.
    bases = [np.linalg.qr(rng.standard_normal((D, R)))[0] for _ in range(_DRAWS)]
    cosines = [np.linalg.svd(basis[:K], compute_uv=False) for basis in bases]
    angles = np.degrees(np.arccos(np.clip(cosines, 0.0, 1.0))).mean(0)
    return np.arange(1, len(angles) + 1), angles


COLUMNS = [
    Column("variant"),
    Column("of"),
    Column("mean", group="cosine", digits=3),
    Column("lowest layer", group="cosine", digits=3),
    Column("highest layer", group="cosine", digits=3),
    Column("random, sd", group="cosine", digits=3),
    Column("the paper's", group="cosine"),
    Column("measured", group="mean squared cosine of angles", digits=3),
    Column("random", group="mean squared cosine of angles", digits=3),
]


def _table(runs: Sequence[RunRecord]) -> Table:
    """Means over layers of every LRKV label, with the paper's claim beside."""
    rows = [row for group in groups(runs)[0] for row in _rows(group)]
    return Table(
        TITLE, COLUMNS, rows, missing=[] if rows else ["no run: LRKV, analysed"],
        notes=[
            "Cosine of W_shared and U_h B_hᵀ, mean over heads and layers ± standard deviation over "
            "seeds; lowest and highest are layers' means over heads and seeds. Angles: between the "
            "columns of U_h and of W_shared, random K / D. The paper gives the cosines without a "
            "table, and does not say of keys or of values.",
        ],
        name="table",
    )  # fmt: skip


def _rows(group: Group):
    claim = printed("heads", "cosine")
    for line in _with_parts(group, every=True):
        for family, name in FAMILIES.items():
            by_layer, _ = line.over_seeds(_by_layer(family, "mean_cosine"))
            null = line.first["geometry"]["mean"][family]
            means = {
                what: line.each(lambda a, w=what, f=family: a["geometry"]["mean"][f][w])
                for what in ("mean_cosine", "mean_square")
            }
            yield Row.of(
                line.label, name, Cell.over(means["mean_cosine"]), float(by_layer.min()),
                float(by_layer.max()), null["cosine_null_sd"], claim.text,
                Cell.over(means["mean_square"]), null["mean_square_null"], block=group.name,
            )  # fmt: skip
