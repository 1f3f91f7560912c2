"""What the configurations alone say: Tables 4 to 7."""

import numpy as np
from flax import nnx

from lrkv_jax.config import GQA, LRKV, MHA, MLA, MQA, ModelConfig
from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.looks import name_of
from lrkv_jax.lab.report.printed import KINDS, SCALES, of_paper, printed
from lrkv_jax.lab.report.table import Cell, Column, Row, Table
from lrkv_jax.models.accounting.counts import (
    cache_bytes_fraction,
    cache_fraction,
    cache_fraction_published,
    parameter_counts,
    training_exaflops,
    training_tokens,
)
from lrkv_jax.models.transformer import Block

D, H, K, G, C, R = 96, 4, 8, 2, 12, 3
ENTRIES = {
    "mha": MHA(), "gqa": GQA(kv_heads=G), "mqa": MQA(), "mla": MLA(latent=C, rope_width=0),
    "lrkv": LRKV(rank=R, rope="full"),
}  # fmt: skip
# kind: (W_h, axis that is compressed, ranks of W_h, of all W_h, of keys and values, of W_i − W_j)
STATED = {
    "mha": ("independent", "none", ("K", K), ("H·K", H * K), ("2·H·K", 2 * H * K), ("K", K)),
    "gqa": ("W_g(h)", "heads", ("K", K), ("G·K", G * K), ("2·G·K", 2 * G * K), ("in a group", 0)),
    "mqa": ("W_shared", "heads", ("K", K), ("K", K), ("2·K", 2 * K), ("none", 0)),
    "mla": ("W_down W_up,h", "features", ("min(K, C)", min(K, C)), ("C", C), ("C", C), ("K", K)),
    "lrkv": ("W_shared + U_h B_hᵀ", "heads", ("K", K), ("K + H·R", K + H * R),
             ("2·(K + H·R)", 2 * (K + H * R)), ("min(K, 2·R)", min(K, 2 * R))),
}  # fmt: skip
MECHANISM_COLUMNS = [Column("variant"), Column("W_h of keys"), Column("compresses")] + [
    Column(f"rank of {what}") for what in ("W_h", "all W_h", "all keys and values", "W_1 − W_2")
]
MLA_NOTE = (
    "The paper's table: rank ≤ C, across tokens. At its sizes C ≥ K, so no head is bounded; the "
    "heads together are, and it is features that are compressed, of each token alone."
)


@artefact("Table 4", "Attention mechanisms", reads="configurations")
def table04_mechanisms(runs):
    """How each variant makes keys and values, and the ranks that follow, measured.

    The ranks are of the variants' own layers at random weights, at a width that limits none of
    them.
    """
    rows = []
    for kind, (form, axis, *stated) in STATED.items():
        cells = [
            f"{symbol}: {found}" if found == rank else f"{symbol}: {rank} stated, {found} found"
            for (symbol, rank), found in zip(stated, _ranks(kind), strict=True)
        ]
        note = MLA_NOTE if kind == "mla" else ""
        rows.append(Row.of(name_of(kind), form, Cell(axis, note=note), *cells))
    sizes = f"D = {D}, H = {H}, K = {K}, G = {G}, C = {C}, R = {R}"
    note = (
        f"Measured on random weights of the layers themselves, {sizes}. Keys and values of all "
        "heads together span what a token must leave in the cache."
    )
    return Table("Mechanisms", MECHANISM_COLUMNS, rows, notes=[note])


def _ranks(kind):
    """Ranks of one head's key weights, all heads' keys, all keys and values, and a difference."""
    keys, values = _head_weights(kind, "key"), _head_weights(kind, "value")
    together = [np.concatenate(list(some), axis=1) for some in (keys, [*keys, *values])]
    return [np.linalg.matrix_rank(w) for w in (keys[0], *together, keys[0] - keys[1])]


def _head_weights(kind, what):
    """W_h of each head, float64 [H, D, K], of the variant's own parameters, drawn anew."""
    model = ModelConfig(
        layers=1, width=D, heads=H, head_width=K, vocabulary=8, attention=ENTRIES[kind]
    )
    layer = nnx.eval_shape(lambda: Block(model)).attention  # shapes alone

    def of(name):
        seed = [*name.encode()]  # a part that keys and values share is one part
        return np.random.default_rng(seed).standard_normal(getattr(layer, name).shape)

    if kind == "mla":
        return np.einsum("DC,CHK->HDK", of("down"), of(f"up_{what}"))
    if kind == "lrkv":
        return of(what) + of(f"{what}_down") @ of(f"{what}_up")
    return np.repeat(of(what).transpose(1, 0, 2), H // of(what).shape[1], axis=0)


SHAPE = {
    "layers": "layers", "heads": "heads", "width": "width", "feed_forward": "feed-forward",
    "vocabulary": "vocabulary",
}  # fmt: skip
ARCHITECTURE_COLUMNS = [
    Column("scale"),
    *map(Column, SHAPE.values()),
    Column("MHA", "M", digits=1, group="parameters"),
    Column("MHA, tied head", "M", digits=1, group="parameters"),
    Column("LRKV", "M", digits=1, group="parameters"),
    Column("LRKV's keys and values", "% of MHA's", digits=1, group="parameters"),
]


@artefact("Table 5", "Model architectures", reads="configurations")
def table05_architectures(runs):
    """The scales' shapes and true parameter counts, from the configurations and the model."""
    note = (
        "The printed value stands beside ours where they differ. Keys and values: the parameters "
        "that make them. Heads are 128 wide throughout."
    )
    return Table(
        "Architectures", ARCHITECTURE_COLUMNS, list(map(_architecture_row, SCALES)), notes=[note]
    )


def _architecture_row(scale):
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


TRAINING_COLUMNS = [
    Column("scale"), Column("context"), Column("sequences per step"), Column("in parts"),
    Column("tokens per step"), Column("tokens", "10⁹"), Column("steps"),
    *(Column(kind.upper(), "10¹⁸ FLOP", digits=1, group="compute") for kind in KINDS),
]  # fmt: skip


@artefact("Table 6", "Training configuration", reads="configurations")
def table06_training(runs):
    """How each scale is trained, and what that costs by the full formula."""
    note = (
        "Compute: 6·(N − lookup) + 6·L·H·T·(logit width + value width) per token. The paper's "
        "batch of 8 with 2 accumulation steps is 16 sequences per step here. All scales: Muon 0.02 "
        "on matrices, AdamW 0.2 on the embedding and 0.004 on the head, cosine after 2,000 steps."
    )
    return Table("Training", TRAINING_COLUMNS, list(map(_training_row, SCALES)), notes=[note])


def _training_row(scale):
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


SIZES_COLUMNS = [
    Column("scale"), Column("heads"), Column("cache", "%", digits=1, group="MQA"),
    Column("key/value heads", group="GQA"), Column("cache", "%", digits=1, group="GQA"),
    Column("latent", group="MLA"), Column("cache", "%", digits=1, group="MLA"),
    Column("with its rope key", "%", digits=1, group="MLA"),
    Column("rank", group="LRKV"), Column("cache", "%", digits=1, group="LRKV"),
    Column("with its inverse norms", "%", digits=1, group="LRKV"),
]  # fmt: skip


@artefact("Table 7", "Attention configurations", reads="configurations")
def table07_attention_configs(runs):
    """The variants' sizes at each scale, and their caches over MHA's."""
    note = (
        "Cached values over MHA's. MLA's published count leaves out its rope key of 64 values; "
        "LRKV's inverse norms are one float32 per head and token, in bytes of a bfloat16 cache."
    )
    return Table(
        "Attention configurations", SIZES_COLUMNS, list(map(_sizes_row, SCALES)), notes=[note]
    )


def _sizes_row(scale):
    model = {kind: of_paper(scale, kind).model for kind in ("mqa", "gqa", "mla", "lrkv")}

    def share(kind):
        value = 100 * cache_fraction_published(model[kind])
        return Cell(value, printed=printed("table07", scale, kind))

    return Row.of(
        SCALES[scale],
        model["mqa"].heads,
        share("mqa"),
        model["gqa"].attention.kv_heads,
        share("gqa"),
        model["mla"].attention.latent,
        share("mla"),
        100 * cache_fraction(model["mla"]),
        model["lrkv"].attention.rank,
        share("lrkv"),
        100 * cache_bytes_fraction(model["lrkv"]),
    )
