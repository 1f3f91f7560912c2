"""Table 1: held-out cross-entropy and bits per byte of every variant, with what its cache holds.

    python experiments/table01_pretraining.py RUN... --out DIR

A block for each scale among the runs. The paper's value stands beside ours where a run repeats its
setting, and in a table of its own elsewhere.
"""

from lrkv_jax.artefacts import (
    LOSS_COLUMNS,
    LOSS_NOTE,
    SCALES,
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


def make(runs):
    rows = []
    for setting in settings(runs):
        lines = {line(kind, setting.main(kind)): setting.main(kind) for kind in KINDS}
        if any(lines.values()):  # an ablation alone is table 8's
            rows += loss_rows(setting.name, lines, beside=beside)
    rows = rows or [Row.of("any variant", *[no_run("any scale")] * (len(LOSS_COLUMNS) - 1))]
    return [Table("Pretraining", LOSS_COLUMNS, rows, notes=[LOSS_NOTE]), as_printed(runs)]


def line(kind, runs):
    sized = [run.label for run in runs.values() if run.size is not None]
    return sized[0] if sized else name_of(kind)


def beside(run, what):
    scale = paper_scale(run)
    return scale and printed("table01", what, scale, run.kind)


def as_printed(runs):
    """The paper's own rows, where no run repeats them."""
    repeated = {(paper_scale(run), run.kind) for run in runs if run.finished}
    columns = [Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB")]
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table01", what, scale, kind) for what in ("cache", "ce", "bpb")]
            if values[0] and (scale, kind) not in repeated:
                cells = [Cell(value.text, note=value.verdict) for value in values]
                block = f"{SCALES[scale]}: paper, printed; no run of ours"
                rows.append(Row.of(name_of(kind), *cells, block=block))
    return Table("The paper's values, printed", columns, rows, name="printed")


ARTEFACT = Artefact("table01_pretraining", "Pretraining across scales", "Table 1", make)

if __name__ == "__main__":
    command(ARTEFACT)
