"""Table 3: effective rank of heads, uncentred and centred.

Counts, % of heads (the paper's convention), % of the cap that centring leaves, the random-weights
null, components for 90 %, and what centring changes against cap and null. The paper's own values
stand in a table of their own, with % of cap recomputed.
"""

from collections.abc import Sequence

from lrkv_jax.artefacts.analysed import FORMS, Line, groups
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.printed import (
    SCALES,
    Printed,
    paper_scale,
    printed,
    printed_table,
    shipped,
    verdict,
)
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import RunRecord

_UNCENTRED, _CENTRED = "uncentred", "centred (PCA)"
_CHANGE = "centring changes it by, points of cap"
COLUMNS = [
    Column("variant"),
    Column("count", group=_UNCENTRED),
    Column("% of heads", group=_UNCENTRED, digits=1),
    Column("null", "% of heads", group=_UNCENTRED, digits=1),
    Column("count", group=_CENTRED),
    Column("% of heads", group=_CENTRED, digits=1),
    Column("% of cap", group=_CENTRED, digits=1),
    Column("null", "% of cap", group=_CENTRED, digits=1),
    Column("components for 90 %", group=_CENTRED, digits=1),
    Column("measured", group=_CHANGE, digits=1),
    Column("null", group=_CHANGE, digits=1),
]


@artefact("Table 3", "Effective rank of heads", reads="analyses")
def table03_effective_rank(runs):
    return [*(_rank_table(runs, form) for form in FORMS), _printed_ranks()]


def _rank_table(runs: Sequence[RunRecord], form: str) -> Table:
    """Every analysed label; the paper's value beside one that repeats its setting."""
    found, missing = groups(runs)
    rows = []
    for group in found:
        block = f"{group.name}, {group.heads} heads, cap {100 * cap_share(group.heads):.1f} %"
        rows += [_row(line, form, block) for line in group.every]
        rows += [
            Row.of(
                gap.split(": ", 1)[1].removeprefix(f"{group.name} ").split(",")[0],
                *[Cell(gap=gap)] * (len(COLUMNS) - 1), block=block,
            )
            for gap in group.gaps
            if not gap.startswith("analysed at")
        ]  # fmt: skip
    gaps = missing or (["no run: any scale"] if not found else [])
    return Table(
        f"Effective rank of heads, {FORMS[form]}", COLUMNS, rows, missing=gaps,
        notes=[
            "Mean over layers ± standard deviation over seeds. Null: the same variant with random "
            "weights. Cap: H heads less their mean span H − 1 dimensions, so that centring alone "
            "takes 100 / H points of heads from any model. Components: the fewest that hold 90 % "
            "of the centred variance. Query compensation is what centring adds in points of the "
            "cap, over what it adds to random weights: it shows a direction that the heads "
            "have in common, as where they share keys, and that they differ in the others.",
        ],
        name="" if form == "query_key" else form,
    )  # fmt: skip


def cap_share(heads: int) -> float:
    """The largest effective rank of centred heads over their number."""
    return (heads - 1) / heads


def _row(line: Line, form: str, block: str) -> Row:
    beside = {centring: _beside(line, form, centring) for centring in ("uncentred", "centred")}
    null = line.first[form]["null"]["mean"]

    def cell(centring, what, printed=None):
        # None of one head, centred: there is no cap.
        return Cell.over(line.each(lambda a: a[form]["mean"][centring][what]), printed=printed)

    change = line.each(lambda a: a[form]["compensation"]["of_cap"])
    return Row.of(
        line.label,
        cell("uncentred", "effective_rank"),
        cell("uncentred", "percent_of_heads", beside["uncentred"]),
        null["uncentred"]["percent_of_heads"],
        cell("centred", "effective_rank"),
        cell("centred", "percent_of_heads", beside["centred"]),
        cell("centred", "percent_of_cap", _of_cap(beside["centred"], line.first["heads"])),
        null["centred"]["percent_of_cap"],
        cell("centred", "components_90"),
        Cell.over(change),
        line.first[form]["compensation"]["of_cap_null"],
        block=block,
    )


def _beside(line: Line, form: str, centring: str) -> Printed | None:
    run = line.runs[min(line.runs)]
    if form != "query_key":
        return None  # the paper has none
    scale = paper_scale(run, any_size=run.kind == "lrkv")
    kind = f"lrkv_r{run.size}" if run.kind == "lrkv" else run.kind
    return printed("table03", scale, kind, centring) if scale else None


def _of_cap(value: Printed | None, heads: int) -> Printed | None:
    """A printed % of heads as % of the cap, to a digit."""
    if value is None:
        return None
    recomputed = value.value / cap_share(heads)
    return Printed(recomputed, f"{recomputed:.1f}, recomputed", value.verdict)


PRINTED_COLUMNS = [
    Column("variant"),
    Column("uncentred", "% of heads", digits=1),
    Column("PCA", "% of heads", digits=1),
    Column("PCA, recomputed", "% of cap", digits=1),
    Column("change as printed", "points of heads", digits=1),
    Column("of which the cap", "points of heads", digits=1),
    Column("change", "points of cap", digits=1),
]


def _printed_ranks() -> Table:
    """The paper's table, with what it comes to of the cap."""
    rows = []
    for scale, variants in printed_table("table03").items():
        heads = shipped(scale).model.heads
        block = f"{SCALES[scale]}, {heads} heads, cap {100 * cap_share(heads):.1f} %"
        for kind in variants:
            before, after = (printed("table03", scale, kind, what)
                             for what in ("uncentred", "centred"))  # fmt: skip
            of_cap = after.value / cap_share(heads)
            own = after.verdict if after.verdict != verdict("table03") else ""
            rows.append(
                Row.of(
                    Cell(_name(kind), note=own), Cell(before.text), Cell(after.text), of_cap,
                    after.value - before.value, -100 / heads, of_cap - before.value, block=block,
                )
            )  # fmt: skip
    return Table(
        "The paper's effective ranks, printed", PRINTED_COLUMNS, rows,
        notes=[verdict("table03")], name="printed",
    )  # fmt: skip


def _name(kind: str) -> str:
    kind, _, rank = kind.partition("_r")
    return name_of(kind) + (f", rank {rank}" if rank else "")
