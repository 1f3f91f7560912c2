"""Table 6: how each scale is trained, and what that costs by the full formula.

python experiments/table06_training.py --out DIR
"""

from lrkv_jax.accounting import training_exaflops, training_tokens
from lrkv_jax.artefacts import SCALES, Artefact, Cell, Column, Row, Table, command, printed
from lrkv_jax.comparison import KINDS
from lrkv_jax.config import load_config

COLUMNS = [
    Column("scale"), Column("context"), Column("sequences a step"), Column("in parts"),
    Column("tokens a step"), Column("tokens", "10⁹"), Column("steps"),
    *(Column(kind.upper(), "10¹⁸ FLOP", digits=1, group="compute") for kind in KINDS),
]  # fmt: skip


def make(runs):
    note = (
        "Compute: 6·(N − lookup) + 6·L·H·T·(logit width + value width) a token. The paper's batch "
        "of 8 with 2 accumulation steps is 16 sequences a step here. Optimiser, in all: Muon 0.02 "
        "on matrices, AdamW 0.2 on the embedding and 0.004 on the head, cosine after 2,000 steps."
    )
    return Table("Training", COLUMNS, list(map(row, SCALES)), notes=[note])


def row(scale):
    runs = {kind: load_config(scale, [f"attention={kind}"]) for kind in KINDS}
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


ARTEFACT = Artefact("table06_training", "Training configuration", "Table 6", make)

if __name__ == "__main__":
    command(ARTEFACT)
