"""Shared parts and residuals of heads: Figure 8, and what the paper describes alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from lrkv_jax.lab.report.analysed import (
    FAMILIES,
    Group,
    Line,
    draw_line,
    groups,
    layer_axis,
    pictures,
)
from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.comparison import RunRecord
from lrkv_jax.lab.report.figure import Picture, legend_below, mean_and_sd, panels
from lrkv_jax.lab.report.looks import GREY
from lrkv_jax.lab.report.printed import printed
from lrkv_jax.lab.report.table import Cell, Column, Row, Table

NORM_TITLE = "Norms of keys and values"
# LRKV's parts, which also differ without their colours.
PARTS: dict[str, dict[str, Any]] = {
    "shared": {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    "residual": {"color": "#009E73", "linestyle": ":", "marker": "v"},
    "total": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
}
_PART_NAMES = {
    "shared": "‖W_shared‖",
    "residual": "‖U_h B_hᵀ‖",
    "total": "‖W_shared + U_h B_hᵀ‖",
}


@artefact("Figure 8", NORM_TITLE, reads="analyses")
def fig08_key_norms(runs):
    """Frobenius norms of keys and values by layer.

    MHA's, and LRKV's shared part, residual and total; the paper says 3.1 to 6.7 times MHA's in one
    place and 4 to 5 in another.
    """
    return pictures(runs, NORM_TITLE, _norm_picture)


def _norm_picture(group: Group) -> Picture:
    ours, theirs = group.of("lrkv"), group.of("mha")
    gaps = [f"no analysed run: {group.name} {name}"
            for name, lines in (("LRKV", ours), ("MHA", theirs)) if not lines]  # fmt: skip
    if len(gaps) == 2:
        return Picture(NORM_TITLE, None, gaps=gaps)
    figure, axes = panels(max(1, len(ours)), len(FAMILIES))
    ratios = []
    for row, line in zip(axes, ours or [None], strict=True):
        row[0].set_ylabel("Frobenius norm,\nmean over heads")
        for axis, (family, name) in zip(row, FAMILIES.items(), strict=True):
            places = layer_axis(axis, group.layers)
            for other in theirs:
                draw_line(axis, places, other, _norms(family, "total"), label="MHA ‖W_h‖")
            parts = line.first["magnitude"]["per_layer"][0][family] if line else {}
            for part, style in PARTS.items():
                if parts.get(part) is not None:
                    of_part = _norms(family, part)
                    draw_line(axis, places, line, of_part, label=_PART_NAMES[part], **style)
            axis.set_ylim(bottom=0)  # after all lines: it keeps the top as it is
            axis.set_title(f"{line.label}, {name}" if line else name)
            if line and theirs:
                total, of_mha = (
                    each.over_seeds(_norms(family, "total"))[0] for each in (line, theirs[0])
                )
                times = _times(total / of_mha)
                axis.set_title(f"{line.label}\n{name}: total {times} MHA's")
                ratios.append(f"{line.label}, {name} {times}")
    legend_below(figure, 4)
    claim = printed("heads", "key_norm", "results"), printed("heads", "key_norm", "discussion")
    against = "LRKV's total over MHA's, by layer: " if ratios else ""
    return Picture(
        NORM_TITLE, figure,
        f"{against}{'; '.join(ratios)}{'. ' if ratios else ''}The paper says of keys "
        f"{claim[0].text}× in its results and {claim[1].text}× in its discussion. QK-norm hides "
        f"the norm of a key from its logits; nothing hides a value's. {group.seeds}",
        gaps=gaps,
    )  # fmt: skip


def _norms(family, part):
    return lambda a: [layer[family][part] for layer in a["magnitude"]["per_layer"]]


def _times(ratios: np.ndarray) -> str:
    return f"{ratios.min():.2f} to {ratios.max():.2f}×"


OVERLAP_TITLE = "Shared part against residuals"
_OVERLAP_STYLES = {
    "key": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    "value": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
}
_DRAWS = 4  # random subspaces of the null; their angles are alike to a degree


@artefact("Described, not shown", OVERLAP_TITLE, reads="analyses")
def overlap(runs):
    """How LRKV's residuals lie against its shared part.

    Cosines (the paper says 0.2 to 0.4) and principal angles by layer, beside random residuals.
    """
    return [*pictures(runs, OVERLAP_TITLE, _overlap_pictures), _table(runs)]


def _with_parts(group: Group, *, every: bool = False) -> list[Line]:
    """Its LRKV lines that have residuals."""
    return [
        line
        for line in group.of("lrkv", every=every)
        if line.first["geometry"] and line.first["rank"]
    ]


def _overlap_pictures(group: Group) -> list[Picture]:
    """A picture for each LRKV line: cosines, overlap of column spaces, principal angles."""
    lines = _with_parts(group)
    if not lines:
        return [Picture(OVERLAP_TITLE, None, gaps=[f"no analysed run: {group.name} LRKV"])]
    many = len(lines) > 1
    return [_overlap_picture(group, line, line.label if many else "") for line in lines]


def _overlap_picture(group: Group, line: Line, name: str) -> Picture:
    figure, (axes,) = panels(1, 3, panel=(3.7, 3.2))
    places, claim = layer_axis(axes[0], group.layers), printed("heads", "cosine")
    axes[0].set_xlim(0.8, group.layers + 0.2)  # room for what stands aside
    layer_axis(axes[1], group.layers)
    for aside, (family, title) in zip((-0.07, 0.07), FAMILIES.items(), strict=True):
        style: dict[str, Any] = {"label": title} | _OVERLAP_STYLES[family]
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
        f"{OVERLAP_TITLE}, {line.label}", figure,
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


OVERLAP_COLUMNS = [
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
        OVERLAP_TITLE, OVERLAP_COLUMNS, rows, missing=[] if rows else ["no run: LRKV, analysed"],
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


FIT_TITLE = "Heads as a shared matrix and residuals"
FITS = {
    "svd": "truncated SVD of each head",
    "mean_svd": "mean of heads + SVD",
    "alternating": "shared + residuals, alternating",
    "learned": "LRKV's own split",
}
_FIT_STYLES = {
    "svd": {"facecolor": "white", "hatch": "....."},
    "mean_svd": {"facecolor": "#56B4E9", "hatch": "/////"},
    "alternating": {"facecolor": "#0072B2", "hatch": ""},
    "learned": {"facecolor": "#D55E00", "hatch": "xxxxx"},
}
ERRORS = {"error": "of the weights", "form_error": "of the forms"}
_WRITTEN = 3  # ranks, up to which each bar's value is written at its foot


@artefact("Described, not shown", FIT_TITLE, reads="analyses")
def factorisation(runs):
    """The best shared matrix and residuals for trained heads.

    Truncated SVD, mean + SVD and alternating least squares at the ranks that the runs were analysed
    at, of MHA's heads and of LRKV's; how LRKV divided its heads itself; and what one matrix
    explains of every variant's heads, before and after they are aligned.
    """
    return [
        *pictures(runs, FIT_TITLE, _fit_pictures),
        _fit_table(runs),
        _learnt_table(runs),
        _energy_table(runs),
    ]


def _ranks(line: Line) -> list[int]:
    """The ranks that each seed was fitted at."""
    of_seeds = [{one["rank"] for one in found} for found in line.each(_fits).values()]
    return sorted(set.intersection(*of_seeds))


def _fits(analysis):
    return analysis["factorisation"]


def _fit(
    line: Line, rank: int, family: str, name: str, what: str, *, of: str = "mean"
) -> dict[int, float] | None:
    """A number of a fit by seed: the mean over layers, or the `null`; None where there is none."""
    found = {}
    for seed, fits in line.each(_fits).items():
        at = next(one for one in fits if one["rank"] == rank)[of][family]
        if name not in at or at[name][what] is None:
            return None
        found[seed] = at[name][what]
    return found


def _fit_pictures(group: Group) -> list[Picture]:
    """A picture of MHA's heads, and one of each LRKV line's."""
    lines = [line for line in (*group.of("mha"), *group.of("lrkv")) if _ranks(line)]
    if not lines:
        return [Picture(FIT_TITLE, None, gaps=[f"no analysed run: {group.name} MHA"])]
    made = [_fit_picture(group, line) for line in lines]
    if lines[0].kind != "mha":
        made[0].gaps.append(f"no analysed run: {group.name} MHA")
    return made


def _fit_picture(group: Group, line: Line) -> Picture:
    at = _ranks(line)
    names = [name for name in FITS if _fit(line, at[0], "key", name, "error") is not None]
    width = max(3.6, 0.24 * len(names) * len(at) + 1.2)
    figure, axes = panels(len(FAMILIES), len(ERRORS), panel=(width, 2.6))
    for row, (family, of) in zip(axes, FAMILIES.items(), strict=True):
        for axis, (what, title) in zip(row, ERRORS.items(), strict=True):
            _bars(axis, line, family, what, names)
            axis.set_title(f"{of}: error {title}")
            axis.grid(axis="x", visible=False)
            axis.margins(y=0.12)
        row[0].set_ylabel("relative error, %")
    for axis in axes[-1]:
        axis.set_xlabel("rank of the residuals, R")
    legend_below(figure, 3)
    return Picture(
        f"{line.label}'s heads as a shared matrix and residuals", figure,
        "Relative Frobenius error over a layer's heads, mean over layers; error bars: one standard "
        "deviation over seeds. Left: of W_h. Right: of W^Q_h (W^K_h)ᵀ, which is that of the logits "
        "of inputs with no preferred direction, before norms and rotation; and of W^V_h W^O_h, "
        "what heads write. Black lines: a layer at its random start. "
        "SVD has no shared part; alternating least squares begins at mean + SVD "
        "and is never worse."
        + (" At LRKV's own rank it and its own split leave rounding." * (line.kind == "lrkv"))
        + f" {group.seeds}",
        name=line.label,
    )  # fmt: skip


def _bars(axis, line: Line, family: str, what: str, names: list[str]) -> None:
    at = _ranks(line)
    each = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [mean_and_sd(_fit(line, rank, family, name, what).values()) for rank in at]
        heights = 100 * np.array([mean for mean, _ in found])
        spreads = [100 * sd for _, sd in found if sd is not None]
        x = np.arange(len(at)) + (place - (len(names) - 1) / 2) * each
        axis.bar(
            x, heights, each * 0.92, yerr=spreads or None, edgecolor="black", lw=0.7, capsize=2,
            label=FITS[name], **_FIT_STYLES[name],
        )  # fmt: skip
        random = [
            100 * mean_and_sd(_fit(line, rank, family, name, what, of="null").values())[0]
            for rank in at
        ]
        axis.hlines(
            random, x - 0.46 * each, x + 0.46 * each, color="black", lw=2.0, zorder=3,
            label="the same fit of a random layer",
        )  # fmt: skip
        if len(at) <= _WRITTEN:
            for where, height in zip(x, heights, strict=True):
                axis.annotate(
                    f"{height:.1f}", (where, 0), (0, 3), textcoords="offset points", ha="center",
                    fontsize=7, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
                )  # fmt: skip
    axis.set_xticks(range(len(at)), at)


BEST = {"svd": "SVD", "mean_svd": "mean + SVD", "alternating": "alternating"}
FIT_COLUMNS = [
    Column("heads of"),
    Column("matrices"),
    Column("rank R"),
    *(
        Column(name, "%", digits=1, group=f"error {of}")
        for of in ERRORS.values()
        for name in BEST.values()
    ),
    Column("random", "%", digits=1, group="alternating, of a random layer's weights"),
]


def _fit_table(runs: Sequence[RunRecord]) -> Table:
    """The errors of the best fits of every MHA and LRKV label, with spreads."""
    rows = [
        Row.of(
            line.label, of, rank,
            *(
                Cell.over({seed: 100 * error for seed, error in found.items()})
                for what in ERRORS
                for name in BEST
                for found in [_fit(line, rank, family, name, what)]
            ),
            100 * float(mean_and_sd(
                _fit(line, rank, family, "alternating", "error", of="null").values()
            )[0]),
            block=group.name,
        )
        for group in groups(runs)[0]
        for line in (*group.of("mha", every=True), *group.of("lrkv", every=True))
        for family, of in FAMILIES.items()
        for rank in _ranks(line)
    ]  # fmt: skip
    return Table(
        FIT_TITLE, FIT_COLUMNS, rows, missing=[] if rows else ["no run: MHA or LRKV, analysed"],
        notes=[
            "Relative Frobenius errors over a layer's heads, mean over layers ± standard deviation "
            "over seeds. SVD: each W_h alone at rank R. Mean + SVD and alternating: one shared "
            "matrix and rank-R residuals; the second is a stationary point of least squares. "
            "At LRKV's own rank its heads are of this shape, and what is left is rounding. "
            "MHA's random layer shares nothing: an error no lower than its own is no sign that "
            "heads share anything. LRKV's begins with residuals of a tenth of its shared part.",
        ],
        name="table",
    )  # fmt: skip


LEARNT = [
    Column("variant"),
    Column("matrices"),
    Column("shared", "% of Σ‖W_h‖²", digits=1),
    Column("residuals", "% of Σ‖W_h‖²", digits=1),
    Column("cross term", "% of Σ‖W_h‖²", digits=1),
    Column("cosine of W_shared with the mean head", digits=3),
    Column("error of mean + SVD", "%", digits=1),
]


def _learnt_table(runs: Sequence[RunRecord]) -> Table:
    """How LRKV divided its heads between the shared part and the residuals."""
    rows = [
        row
        for group in groups(runs)[0]
        for line in group.of("lrkv", every=True)
        if line.first["rank"] in _ranks(line)
        for row in _learnt_rows(group, line)
    ]
    return Table(
        "What LRKV learnt", LEARNT, rows,
        missing=[] if rows else ["no run: LRKV, analysed at its own rank"],
        notes=[
            "Shared and residual parts as shares of Σ‖W_h‖², the shared one counted for each head; "
            "the cross term, twice their inner product, makes up 100. The last column: how far the "
            "heads are from the mean of heads and residuals of LRKV's rank, mean over layers; 0 "
            "would be a W_shared that is the heads' mean.",
        ],
        name="learnt",
    )  # fmt: skip


def _learnt_rows(group: Group, line: Line):
    rank = line.first["rank"]
    for family, of in FAMILIES.items():
        shared, residual, cosine = (
            _fit(line, rank, family, "learned", what)
            for what in ("shared_share", "residual_share", "shared_mean_cosine")
        )
        mean_svd = _fit(line, rank, family, "mean_svd", "error")
        cross = {seed: 1 - shared[seed] - residual[seed] for seed in shared}
        percent = [
            Cell.over({seed: 100 * value for seed, value in values.items()})
            for values in (shared, residual, cross, mean_svd)
        ]
        yield Row.of(
            line.label, of, *percent[:3], Cell.over(cosine) if cosine else "", percent[3],
            block=group.name,
        )  # fmt: skip


ENERGY = [
    Column("variant"),
    Column("of"),
    *(
        Column(name, "% of Σ‖W_h‖²", digits=1, group=group)
        for group in ("trained", "a random layer")
        for name in ("raw", "aligned")
    ),
]


def _energy_table(runs: Sequence[RunRecord]) -> Table:
    """How much of each family of heads one matrix for all of them explains."""
    rows = [
        Row.of(
            line.label, of,
            *(
                Cell.over({
                    seed: 100 * energy[which][family][how] for seed, energy in energies.items()
                })
                for which in ("mean", "null")
                for how in ("raw", "aligned")
            ),
            block=group.name,
        )
        for group in groups(runs)[0]
        for line in group.every
        for energies in [line.each(lambda a: a.get("shared_energy"))]
        if all(energies.values())
        for family, of in FAMILIES.items()
    ]  # fmt: skip
    return Table(
        "Shared energy of heads, raw and aligned", ENERGY, rows,
        missing=[] if rows else ["no run: any scale, analysed by this version"],
        notes=[
            "The share of a layer's Σ‖W_h‖² that one matrix for all heads explains, mean over "
            "layers ± standard deviation over seeds. Raw: the heads' mean. Aligned: heads are "
            "first moved to be most alike, as far as the model's outputs do not depend on it: each "
            "rope pair of a key by an angle, values by any matrix. Alignment fits random heads "
            "too: compare a trained run with its random layer, the same variant as initialised. "
            "MQA is 100 by definition, as are values of MLA whose latent is no wider than a head.",
        ],
        name="shared_energy",
    )  # fmt: skip
