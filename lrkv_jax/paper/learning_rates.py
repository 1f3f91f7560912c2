"""Beside the paper: each line at several learning rates of the matrices, and its own among them."""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import families

NOTE = (
    "Bits per byte on the whole held-out split at the end of training, mean ± standard deviation "
    "over the seeds that all rates of a line have run. Its own rate has the lowest mean; † it is "
    "the smallest or the largest that was tried, so that a better may lie beyond."
)


@artefact("Beside the paper", "Learning rates")
def learning_rates(runs):
    tables = []
    for family in families(runs):
        swept = {label: line for label, line in family.lines.items() if len(line.by_rate) > 1}
        if swept:
            tables.append(_table(family.name, swept, str(len(tables) or "")))
    missing = ["no line at several learning rates: any scale"]
    return tables or [Table("Learning rates", _columns([]), [], missing=missing)]


def _columns(rates):
    at = [Column(f"{rate:g}", digits=4, group="bits per byte at rate") for rate in rates]
    return [Column("variant"), *at, Column("own rate")]


def _table(name, lines, number):
    rates = sorted({rate for line in lines.values() for rate in line.by_rate})
    rows = []
    for label, line in lines.items():
        cells = []
        for rate in rates:
            bits = line.bits.get(rate, {})
            cells.append(Cell.over(bits) if bits else Cell(gap=f"no run: {label} at {rate:g}"))
        rows.append(Row.of(label, *cells, f"{line.rate:g}{' †' if line.at_edge else ''}"))
    return Table(f"{name}: learning rates", _columns(rates), rows, [NOTE], name=number)
