"""Described in the paper, not shown: the best shared matrix and residuals for trained heads.

Truncated SVD, mean + SVD and alternating least squares at the ranks that the runs were analysed
at, of MHA's heads and of LRKV's; how LRKV divided its heads itself; and what one matrix explains of
every variant's heads, before and after they are aligned.
"""

from collections.abc import Sequence

import numpy as np

from lrkv_jax.artefacts.analysed import FAMILIES, Group, Line, groups, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, mean_and_sd, panels
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import RunRecord

TITLE = "Heads as a shared matrix and residuals"
FITS = {
    "svd": "truncated SVD of each head",
    "mean_svd": "mean of heads + SVD",
    "alternating": "shared + residuals, alternating",
    "learned": "LRKV's own split",
}
_STYLES = {
    "svd": {"facecolor": "white", "hatch": "....."},
    "mean_svd": {"facecolor": "#56B4E9", "hatch": "/////"},
    "alternating": {"facecolor": "#0072B2", "hatch": ""},
    "learned": {"facecolor": "#D55E00", "hatch": "xxxxx"},
}
ERRORS = {"error": "of the weights", "form_error": "of the forms"}
_WRITTEN = 3  # ranks, up to which each bar's value is written at its foot


@artefact("Described, not shown", TITLE, reads="analyses")
def factorisation(runs):
    return [
        *pictures(runs, TITLE, _pictures),
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


def _pictures(group: Group) -> list[Picture]:
    """A picture of MHA's heads, and one of each LRKV line's."""
    lines = [line for line in (*group.of("mha"), *group.of("lrkv")) if _ranks(line)]
    if not lines:
        return [Picture(TITLE, None, gaps=[f"no analysed run: {group.name} MHA"])]
    made = [_picture(group, line) for line in lines]
    if lines[0].kind != "mha":
        made[0].gaps.append(f"no analysed run: {group.name} MHA")
    return made


def _picture(group: Group, line: Line) -> Picture:
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
            label=FITS[name], **_STYLES[name],
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
COLUMNS = [
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
        TITLE, COLUMNS, rows, missing=[] if rows else ["no run: MHA or LRKV, analysed"],
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
