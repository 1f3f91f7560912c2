"""Table 7: the variants' sizes at each scale, and their caches over MHA's."""

from lrkv_jax.accounting.counts import (
    cache_bytes_fraction,
    cache_fraction,
    cache_fraction_published,
)
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.printed import SCALES, of_paper, printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table

COLUMNS = [
    Column("scale"), Column("heads"), Column("cache", "%", digits=1, group="MQA"),
    Column("key/value heads", group="GQA"), Column("cache", "%", digits=1, group="GQA"),
    Column("latent", group="MLA"), Column("cache", "%", digits=1, group="MLA"),
    Column("with its rope key", "%", digits=1, group="MLA"),
    Column("rank", group="LRKV"), Column("cache", "%", digits=1, group="LRKV"),
    Column("with its inverse norms", "%", digits=1, group="LRKV"),
]  # fmt: skip


@artefact("Table 7", "Attention configurations", reads="configurations")
def table07_attention_configs(runs):
    note = (
        "Cached values over MHA's. MLA's published count leaves out its rope key of 64 values; "
        "LRKV's inverse norms are one float32 per head and token, in bytes of a bfloat16 cache."
    )
    return Table("Attention configurations", COLUMNS, list(map(_row, SCALES)), notes=[note])


def _row(scale):
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
