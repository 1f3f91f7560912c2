"""Table 1: held-out cross-entropy and bits per byte of every variant, with what its cache holds.

A block for each scale among the runs. The paper's value stands beside ours where a run repeats its
setting, and in a table of its own elsewhere.
"""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.losses import COLUMNS, NOTE, loss_rows
from lrkv_jax.artefacts.printed import KINDS, SCALES, paper_scale, printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import settings


@artefact("Table 1", "Pretraining across scales")
def table01_pretraining(runs):
    rows = []
    for setting in settings(runs):
        lines = {label if runs else name_of(label): runs for label, runs in setting.beside.items()}
        if any(lines.values()):  # an ablation alone is table 8's
            rows += loss_rows(setting.name, lines, beside=_beside)
    missing = [] if rows else ["no run: any scale"]
    return [Table("Pretraining", COLUMNS, rows, [NOTE], missing=missing), _as_printed(runs)]


def _beside(run, what):
    scale = paper_scale(run)
    return scale and printed("table01", what, scale, run.kind)


def _as_printed(runs):
    """The paper's own rows, where no run repeats them."""
    repeated = {(paper_scale(run), run.kind) for run in runs if run.finished}
    columns = [Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB")]
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table01", what, scale, kind) for what in ("cache", "ce", "bpb")]
            if values[0] and (scale, kind) not in repeated:
                block = f"{SCALES[scale]}: paper, printed; not among these runs"
                rows.append(Row.of(name_of(kind), *map(Cell.of_paper, values), block=block))
    return Table("The paper's values, printed", columns, rows, name="printed")
