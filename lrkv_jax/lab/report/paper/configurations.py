"""Tables that need only the configurations: Tables 4 to 7."""

from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper_values import KINDS, SCALES, of_paper, paper_value
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow
from lrkv_jax.models.accounting.counts import (
    cache_bytes_fraction,
    cache_fraction,
    cache_fraction_published,
    parameter_counts,
    training_exaflops,
    training_tokens,
)

# W_h of keys, the axis that is compressed, and ranks: of W_h, of all heads' keys, of all keys and
# values together, and of W_1 − W_2. tests/lab/report/paper/test_tables.py measures them.
MECHANISMS = {
    "mha": ("independent", "none", "K", "H·K", "2·H·K", "K"),
    "gqa": ("W_g(h)", "heads", "K", "G·K", "2·G·K", "0 in a group"),
    "mqa": ("W_shared", "heads", "K", "K", "2·K", "0"),
    "mla": ("W_down W_up,h", "features", "min(K, C)", "C", "C", "min(K, C)"),
    "lrkv": ("W_shared + U_h B_hᵀ", "heads", "K", "K + H·R", "2·(K + H·R)", "min(K, 2·R)"),
}
MLA_NOTE = (
    "The paper's table: rank ≤ C, across tokens. At its sizes C ≥ K, so no head is bounded; the "
    "heads together are, and it is features that are compressed, of each token alone."
)


@report_item("Table 4", "Attention mechanisms", reads="configurations")
def table04_mechanisms(runs):
    """How each variant makes keys and values, and the ranks that follow."""
    names = ("W_h", "all W_h", "all keys and values", "W_1 − W_2")
    ranks = [Column(f"rank of {name}") for name in names]
    rows = [
        TableRow.of(
            kind.upper(),
            form,
            Cell(axis, note=MLA_NOTE if kind == "mla" else ""),
            *stated,
        )
        for kind, (form, axis, *stated) in MECHANISMS.items()
    ]
    columns = [Column("variant"), Column("W_h of keys"), Column("compresses"), *ranks]
    note = "Keys and values of all heads together span what a token must leave in the cache."
    return Table("Mechanisms", columns, rows, [note])


SHAPE = ("layers", "heads", "width", "feed_forward", "vocabulary")


@report_item("Table 5", "Model architectures", reads="configurations")
def table05_architectures(runs):
    """The scales' shapes and true parameter counts, from the configurations and the model."""
    columns = [
        Column("scale"),
        *(Column(name.replace("_", "-")) for name in SHAPE),
        Column("MHA", "M", digits=1, group="parameters"),
        Column("MHA, tied head", "M", digits=1, group="parameters"),
        Column("LRKV", "M", digits=1, group="parameters"),
        Column("LRKV's keys and values", "% of MHA's", digits=1, group="parameters"),
    ]
    note = (
        "The printed value stands beside ours where they differ. Keys and values: the parameters "
        "that make them. Heads are 128 wide throughout."
    )
    return Table("Architectures", columns, list(map(_architecture_row, SCALES)), [note])


def _architecture_row(scale: str) -> TableRow:
    model, lrkv = (of_paper(scale, kind).model for kind in ("mha", "lrkv"))
    shape = []
    for name in SHAPE:
        value = model.feed_forward_width if name == "feed_forward" else getattr(model, name)
        paper = paper_value("table05", scale, name)
        shape.append(Cell(str(value), paper=None if paper.value == value else paper))
    counts, low = parameter_counts(model), parameter_counts(lrkv)
    return TableRow.of(
        SCALES[scale],
        *shape,
        Cell(counts.total / 1e6, paper=paper_value("table05", scale, "parameters")),
        (counts.total - counts.head) / 1e6,
        low.total / 1e6,
        100 * low.kv / counts.kv,
    )


@report_item("Table 6", "Training configuration", reads="configurations")
def table06_training(runs):
    """How each scale is trained, and what that costs by the full formula."""
    columns = [
        Column("scale"), Column("context"), Column("sequences per step"), Column("in parts"),
        Column("tokens per step"), Column("tokens", "10⁹"), Column("steps"),
        *(Column(kind.upper(), "10¹⁸ FLOP", digits=1, group="compute") for kind in KINDS),
    ]  # fmt: skip
    note = (
        "Compute: 6·(N − lookup) + 6·L·H·T·(logit width + value width) per token. The paper's "
        "batch of 8 with 2 accumulation steps is 16 sequences per step here. All scales: Muon 0.02 "
        "on matrices, AdamW 0.2 on the embedding and 0.004 on the head, cosine after 2,000 steps."
    )
    return Table("Training", columns, list(map(_training_row, SCALES)), [note])


def _training_row(scale: str) -> TableRow:
    config = of_paper(scale, "mha")
    train = config.train
    compute = [training_exaflops(of_paper(scale, kind)) for kind in KINDS]
    return TableRow.of(
        SCALES[scale],
        train.seq_len,
        train.global_batch_size,
        train.grad_accum_steps,
        train.global_batch_size * train.seq_len,
        training_tokens(config) // 10**9,
        train.total_steps,
        Cell(compute[0], paper=paper_value("table06", scale, "exaflops")),
        *compute[1:],
    )


@report_item("Table 7", "Attention configurations", reads="configurations")
def table07_attention_configs(runs):
    """The variants' sizes at each scale, and their caches over MHA's."""
    columns = [
        Column("scale"), Column("heads"), Column("cache", "%", digits=1, group="MQA"),
        Column("key/value heads", group="GQA"), Column("cache", "%", digits=1, group="GQA"),
        Column("latent", group="MLA"), Column("cache", "%", digits=1, group="MLA"),
        Column("with its rope key", "%", digits=1, group="MLA"),
        Column("rank", group="LRKV"), Column("cache", "%", digits=1, group="LRKV"),
        Column("with its inverse norms", "%", digits=1, group="LRKV"),
    ]  # fmt: skip
    note = (
        "Cached values over MHA's. MLA's published count leaves out its rope key of 64 values; "
        "LRKV's inverse norms are one float32 per head and token, in bytes of a bfloat16 cache."
    )
    return Table("Attention configurations", columns, list(map(_sizes_row, SCALES)), [note])


def _sizes_row(scale: str) -> TableRow:
    models = {kind: of_paper(scale, kind).model for kind in ("mqa", "gqa", "mla", "lrkv")}
    share = {
        kind: Cell(100 * cache_fraction_published(model), paper=paper_value("table07", scale, kind))
        for kind, model in models.items()
    }
    return TableRow.of(
        SCALES[scale],
        models["mqa"].heads,
        share["mqa"],
        models["gqa"].attention.kv_heads,
        share["gqa"],
        models["mla"].attention.kv_lora_rank,
        share["mla"],
        100 * cache_fraction(models["mla"]),
        models["lrkv"].attention.rank,
        share["lrkv"],
        100 * cache_bytes_fraction(models["lrkv"]),
    )
