"""Beside the paper: effective ranks of heads as held-out text meets them, and random weights'.

An input direction counts as often as it occurs. Needs `lrkv analyze RUN... --batches 4`.
"""

from lrkv_jax.artefacts.analysed import FORMS, TEXTLESS, Group, Line, groups
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.table import Cell, Column, Row, Table

TITLE = "Effective rank of heads, weighted by held-out text"
_VIEWS = {"uncentred": "uncentred, % of H", "centred": "centred, % of H − 1"}
COLUMNS = [
    Column("variant"),
    *(
        Column(name, digits=1, group=group)
        for group in _VIEWS.values()
        for name in ("plain", "weighted", "random weights, weighted")
    ),
    Column("mean cosine of two heads, weighted"),
]


@artefact("Beside the paper", TITLE, reads="analyses")
def weighted_ranks(runs):
    found, missing = groups(runs)
    rows = [row for group in found for form in FORMS for row in _block(group, form)]
    gaps = [] if rows else missing or ([TEXTLESS] if found else ["no run: any scale"])
    return Table(
        TITLE, COLUMNS, rows, missing=gaps,
        notes=[
            "Means over layers ± standard deviation over seeds. Weighted: forms meet inputs with "
            "the second moment C of the layer's own inputs on held-out text, ⟨A, A'⟩ = "
            "tr(Aᵀ C A' C). Random weights meet the same inputs; ± is the deviation of a mean over "
            "as many layers.",
        ],
    )  # fmt: skip


def _block(group: Group, form: str) -> list[Row]:
    lines = [line for line in group.every if all(line.each(lambda a: a.get("weighted")).values())]
    return [_row(line, form, f"{group.name}, {FORMS[form]}") for line in lines]


def _row(line: Line, form: str, block: str) -> Row:
    cells = [cell for view in _VIEWS for cell in _ranks(line, form, view)]
    cosines = line.each(lambda a: a["weighted"][form]["mean"]["mean_off_diagonal"])
    return Row.of(line.label, *cells, _over(cosines), block=block)


def _ranks(line: Line, form: str, view: str) -> list[Cell]:
    """Plain, weighted, and of random weights."""
    return [
        _over(line.each(lambda a: a[form]["mean"][view]["percent_of_cap"])),
        _over(line.each(lambda a: a["weighted"][form]["mean"][view]["percent_of_cap"])),
        _random(line.first["weighted"][form]["null"], view),
    ]


def _over(seeds: dict[int, float | None]) -> Cell:
    # One head has no rank once centred, and no other head.
    return Cell.over(seeds, gap="one head" if None in seeds.values() else "")


def _random(null: dict, view: str) -> Cell:
    mean, sd = (null[what][view]["percent_of_cap"] for what in ("mean", "sd_of_mean"))
    if mean is None:
        return Cell(gap="one head")
    return Cell(f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}")
