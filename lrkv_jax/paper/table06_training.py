"""Table 6: how each scale is trained, and what that costs by the full formula."""

from lrkv_jax.accounting.counts import training_exaflops, training_tokens
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.printed import KINDS, SCALES, of_paper, printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table

COLUMNS = [
    Column("scale"), Column("context"), Column("sequences per step"), Column("in parts"),
    Column("tokens per step"), Column("tokens", "10⁹"), Column("steps"),
    *(Column(kind.upper(), "10¹⁸ FLOP", digits=1, group="compute") for kind in KINDS),
]  # fmt: skip


@artefact("Table 6", "Training configuration", reads="configurations")
def table06_training(runs):
    note = (
        "Compute: 6·(N − lookup) + 6·L·H·T·(logit width + value width) per token. The paper's "
        "batch of 8 with 2 accumulation steps is 16 sequences per step here. All scales: Muon 0.02 "
        "on matrices, AdamW 0.2 on the embedding and 0.004 on the head, cosine after 2,000 steps."
    )
    return Table("Training", COLUMNS, list(map(_row, SCALES)), notes=[note])


def _row(scale):
    runs = {kind: of_paper(scale, kind) for kind in KINDS}
    train = runs["mha"].train
    compute = [Cell(training_exaflops(run)) for run in runs.values()]
    compute[0] = Cell(compute[0].value, printed=printed("table06", scale, "exaflops"))
    return Row.of(
        SCALES[scale],
        train.context,
        train.batch,
        train.accumulation,
        train.batch * train.context,
        training_tokens(runs["mha"]) // 10**9,
        train.total_steps,
        *compute,
    )
