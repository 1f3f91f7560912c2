"""Table 9: held-out loss of models trained at a long context.

    python experiments/table09_long_context.py RUN... --out DIR

The runs whose context is 8,192 tokens or more.
"""

from lrkv_jax.artefacts import (
    LOSS_COLUMNS,
    LOSS_NOTE,
    Artefact,
    Cell,
    Column,
    Row,
    Table,
    command,
    loss_rows,
    name_of,
    no_run,
    paper_scale,
    printed,
)  # fmt: skip
from lrkv_jax.comparison import KINDS, settings

LONG = 8192


def make(runs):
    rows = []
    for setting in settings([run for run in runs if run.config.train.context >= LONG]):
        lines = {name_of(kind): setting.main(kind) for kind in KINDS}
        rows += loss_rows(setting.name, lines, beside=beside)
    gaps = [no_run("a context of 8,192 or more, as 512m_8k")] * (len(LOSS_COLUMNS) - 1)
    rows = rows or [Row.of("any variant", *gaps)]
    return [Table("Long context", LOSS_COLUMNS, rows, notes=[LOSS_NOTE]), as_printed()]


def beside(run, what):
    return printed("table09", run.kind, what) if paper_scale(run) == "512m_8k" else None


def as_printed():
    columns = [
        Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB"),
        Column("CE over MHA's", "%"),
    ]  # fmt: skip
    rows = []
    for kind in KINDS:
        values = [printed("table09", kind, w) for w in ("cache", "ce", "bpb", "loss_over_mha")]
        cells = [Cell(value.text, note=value.verdict) if value else "baseline" for value in values]
        rows.append(Row.of(name_of(kind), *cells, block="512M, 8,192 tokens: paper, printed"))
    return Table("The paper's values, printed", columns, rows, name="printed")


ARTEFACT = Artefact("table09_long_context", "Long context", "Table 9", make)

if __name__ == "__main__":
    command(ARTEFACT)
