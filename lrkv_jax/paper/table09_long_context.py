"""Table 9: held-out loss of models trained at a long context, of 8,192 tokens or more."""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.losses import COLUMNS, NOTE, loss_rows
from lrkv_jax.artefacts.printed import KINDS, paper_scale, printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import settings

LONG = 8192


@artefact("Table 9", "Long context")
def table09_long_context(runs):
    rows = []
    for setting in settings([run for run in runs if run.config.train.context >= LONG]):
        lines = {label if runs else name_of(label): runs for label, runs in setting.beside.items()}
        rows += loss_rows(setting.name, lines, beside=_beside)
    missing = [] if rows else ["no run: a context of 8,192 or more, as 512m_8k"]
    return [Table("Long context", COLUMNS, rows, [NOTE], missing=missing), _as_printed()]


def _beside(run, what):
    return printed("table09", run.kind, what) if paper_scale(run) == "512m_8k" else None


def _as_printed():
    columns = [
        Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB"),
        Column("CE over MHA's", "%"),
    ]  # fmt: skip
    rows = []
    for kind in KINDS:
        values = [printed("table09", kind, what) for what in ("cache", "ce", "bpb")]
        over = printed("table09", kind, "loss_over_mha")
        cells = [*map(Cell.of_paper, values), Cell.of_paper(over) if over else "baseline"]
        rows.append(Row.of(name_of(kind), *cells, block="512M, 8,192 tokens: paper, printed"))
    return Table("The paper's values, printed", columns, rows, name="printed")
