"""Table 5: the scales' shapes and true parameter counts, from the configurations and the model."""

from lrkv_jax.accounting.counts import parameter_counts
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.printed import SCALES, of_paper, printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table

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


@artefact("Table 5", "Model architectures", reads="configurations")
def table05_architectures(runs):
    note = (
        "The printed value stands beside ours where they differ. Keys and values: the parameters "
        "that make them. Heads are 128 wide throughout."
    )
    return Table("Architectures", COLUMNS, list(map(_row, SCALES)), notes=[note])


def _row(scale):
    model, lrkv = (of_paper(scale, kind).model for kind in ("mha", "lrkv"))
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
