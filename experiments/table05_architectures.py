"""Table 5: the scales' shapes and true parameter counts, from configs/ and the code that counts.

python experiments/table05_architectures.py --out DIR
"""

from lrkv_jax.accounting import parameter_counts
from lrkv_jax.artefacts import SCALES, Artefact, Cell, Column, Row, Table, command, printed
from lrkv_jax.config import load_config

SHAPE = {
    "layers": "layers", "heads": "heads", "width": "width", "feed_forward": "feed-forward",
    "vocabulary": "vocabulary",
}  # fmt: skip
COLUMNS = [
    Column("scale"),
    *map(Column, SHAPE.values()),
    Column("MHA", "M", digits=1, group="parameters"),
    Column("MHA, tied head", "M", digits=1, group="parameters"),
    Column("LRKV", "M", digits=1, group="parameters"),
    Column("LRKV's keys and values", "% of MHA's", digits=1, group="parameters"),
]


def make(runs):
    note = "The printed value stands beside ours where it is another. Keys and values: the " \
        "parameters that make them. Heads are 128 wide throughout."  # fmt: skip
    return Table("Architectures", COLUMNS, list(map(row, SCALES)), notes=[note])


def row(scale):
    model = load_config(scale, ["attention=mha"]).model
    lrkv = load_config(scale, ["attention=lrkv"]).model
    ours = {name: getattr(model, name) for name in SHAPE} | {
        "feed_forward": model.feed_forward_width
    }
    shape = []
    for name, value in ours.items():
        paper = printed("table05", scale, name)
        shape.append(Cell(str(value), printed=None if paper.value == value else paper))
    counts, low = parameter_counts(model), parameter_counts(lrkv)
    return Row.of(
        SCALES[scale],
        *shape,
        Cell(counts.total / 1e6, printed=printed("table05", scale, "parameters")),
        (counts.total - counts.head) / 1e6,
        low.total / 1e6,
        100 * low.kv / counts.kv,
    )


ARTEFACT = Artefact("table05_architectures", "Model architectures", "Table 5", make)

if __name__ == "__main__":
    command(ARTEFACT)
