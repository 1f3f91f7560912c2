"""Table 8: held-out loss by LRKV's rank and by MLA's latent width, beside the baselines.

It shows every size of LRKV and MLA among runs that may be compared; an ablation's runs (nano_ranks)
and the baselines of the scale that it extends (nano) come together.
"""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.losses import COLUMNS, NOTE, loss_rows
from lrkv_jax.artefacts.printed import paper_scale, printed, printed_table
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import settings

SIZED = ("lrkv", "mla")
TITLE = "Rank and latent width"


@artefact("Table 8", "Ablation of rank and latent")
def table08_rank_ablation(runs):
    rows = []
    for setting in settings(runs):
        lines = {label: setting.seeds(label) for label in setting.labels}
        sizes = {run.label for run in setting.runs if run.kind in SIZED}
        if len(sizes) > 2:  # more than each kind's own
            baselines = {"MHA": setting.main("mha")}  # a gap where it has no run
            rows += loss_rows(setting.name, baselines | lines, beside=_beside)
    missing = [] if rows else ["no run: a ladder of ranks or latents"]
    return [Table(TITLE, COLUMNS, rows, [NOTE], missing=missing), _as_printed()]


def _beside(run, what):
    if paper_scale(run, any_size=run.kind in SIZED) != "128m":
        return None
    name = f"{run.kind}_{run.size}" if run.kind in SIZED else run.kind
    return printed("table08", name, what)


def _as_printed():
    columns = [Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB")]
    rows = []
    for name in printed_table("table08"):
        cells = (Cell.of_paper(printed("table08", name, what)) for what in ("cache", "ce", "bpb"))
        rows.append(Row.of(name.upper().replace("_", "-"), *cells, block="128M: paper, printed"))
    return Table("The paper's values, printed", columns, rows, name="printed")
