"""Table 8: held-out loss by LRKV's rank and by MLA's latent width, beside the baselines.

    python experiments/table08_rank_ablation.py RUN... --out DIR

Every size of LRKV and MLA among runs that may be compared; an ablation's runs (nano_ranks) and the
baselines of the scale that it extends (nano) come together.
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
    no_run,
    paper_scale,
    printed,
    printed_table,
)  # fmt: skip
from lrkv_jax.comparison import settings

SIZED = ("lrkv", "mla")


def make(runs):
    rows = []
    for setting in settings(runs):
        lines = {label: setting.seeds(label) for label in setting.labels}
        sizes = {run.label for run in setting.runs if run.kind in SIZED}
        if len(sizes) > 2:  # more than each kind's own
            baselines = {"MHA": setting.main("mha")}  # without one, its gap
            rows += loss_rows(setting.name, baselines | lines, beside=beside)
    gaps = [no_run("a ladder of ranks or latents")] * (len(LOSS_COLUMNS) - 1)
    rows = rows or [Row.of("any size", *gaps)]
    return [Table("Rank and latent width", LOSS_COLUMNS, rows, notes=[LOSS_NOTE]), as_printed()]


def beside(run, what):
    if paper_scale(run, any_size=run.kind in SIZED) != "128m":
        return None
    name = f"{run.kind}_{run.size}" if run.kind in SIZED else run.kind
    return printed("table08", name, what)


def as_printed():
    columns = [Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB")]
    rows = []
    for name in printed_table("table08"):
        values = [printed("table08", name, what) for what in ("cache", "ce", "bpb")]
        cells = [Cell(value.text, note=value.verdict) for value in values]
        rows.append(Row.of(name.upper().replace("_", "-"), *cells, block="128M: paper, printed"))
    return Table("The paper's values, printed", columns, rows, name="printed")


ARTEFACT = Artefact("table08_rank_ablation", "Ablation of rank and latent", "Table 8", make)

if __name__ == "__main__":
    command(ARTEFACT)
