"""Table 10: memory and latency of decoding.

Bytes and FLOPs are counted from the configurations. Times are only ever measured: they are read
from decode benchmarks, `lrkv report --bench FILE.json`, as `lrkv bench decode --out` writes them.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from lrkv_jax.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.accounting.serving import attention_flops
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.printed import of_paper, printed_table, verdict
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.config import ModelConfig

SCALES = ("128m", "1.2b", "2.5b", "6.3b")
LENGTH = 2048
SHAPE = ("level", "scale", "batch", "ragged", "dtype", "layers")  # of what one table times
LINES = (
    ("mha", None), ("mqa", None), ("gqa", None), ("mla", None), ("lrkv", "full"),
    ("lrkv", "shared"),
)  # fmt: skip


@artefact("Table 10", "Memory and latency of decoding", reads="benches")
def table10_memory_latency(benches):
    return [costs(), *times(benches)]


def costs() -> Table:
    """Cache and attention FLOPs of one decoded token, over all layers."""
    columns = [
        Column("variant"), Column("cache per token", "KiB", digits=1),
        Column("fixed", "MFLOP", digits=2, group="attention:"),
        Column("each cached token", "kFLOP", digits=1, group="attention:"),
        Column(f"at {LENGTH:,}", "MFLOP", digits=1, group="attention:"),
        Column("over MHA", "×", digits=2, group="attention:"),
        Column("more than MHA", "MFLOP", digits=1, group="attention:"),
        Column("extra cost", group="paper:"), Column("or", "M", digits=2, group="paper:"),
        Column("grows with T", group="paper:"),
    ]  # fmt: skip
    rows = []
    for scale in SCALES:
        mha = attention_flops(of_paper(scale, "mha").model).at(LENGTH)
        for variant, rope in LINES:
            model = of_paper(scale, variant).model
            if rope:
                entry = model.attention.in_mode(rope)
                model = model.model_copy(update={"attention": entry})
            flops = attention_flops(model)
            paper = printed_table("table10")[variant]
            rows.append(
                Row.of(
                    _line(variant, rope),
                    cache_allocated_bytes_per_token(model) / 1024,
                    flops.fixed / 1e6, flops.per_cached_token / 1e3, flops.at(LENGTH) / 1e6,
                    flops.at(LENGTH) / mha, (flops.at(LENGTH) - mha) / 1e6,
                    paper["extra"], _extra_as_printed(model) / 1e6,
                    Cell(paper["dependence"], note=verdict("table10", variant)),
                    block=f"{scale}, {model.layers} layers",
                )
            )  # fmt: skip
    return Table(
        "Cache and attention of one decoded token", columns, rows,
        caption="All layers; the cache bfloat16, as allocated; two FLOPs per multiplication. "
        "MLA is absorbed. LRKV reads its factors, with the whole key rotated (full) or its shared "
        "part. The paper's extra cost is in numbers with a constant of one, over all layers.",
    )  # fmt: skip


def _extra_as_printed(model: ModelConfig) -> int:
    """The paper's extra cost of a step without its O: T·C·K for MLA, H·R·K for LRKV."""
    entry = model.attention
    per_layer = {
        "mla": lambda: LENGTH * entry.latent * model.head_width,
        "lrkv": lambda: model.heads * entry.rank * model.head_width,
    }.get(entry.kind, lambda: 0)
    return model.layers * per_layer()


def _line(variant: str, rope: str | None) -> str:
    """What a row is called."""
    return f"{name_of(variant)}, rope {rope}" if rope else name_of(variant)


def times(benches: Sequence[dict[str, Any]]) -> list[Table]:
    """A table for each shape that the benchmarks measured; a gap for a GPU if none did."""
    tables: list[Table] = []
    for bench in benches:
        shapes: dict[tuple, list[dict[str, Any]]] = {}
        for row in bench["rows"]:
            if row["implementation"] in ("xla", "mosaic"):
                shapes.setdefault(itemgetter(*SHAPE)(row), []).append(row)
        for shape, rows in shapes.items():
            tables.append(_times(bench, rows, shape, f"ms_{len(tables) + 1}"))
    if not any(bench["backend"] == "gpu" for bench in benches):
        gap = "no GPU measurement: run lrkv bench decode there, then lrkv report --bench FILE.json"
        tables.append(Table("Time on a GPU", [Column("variant")], [], name="ms_gpu", missing=[gap]))
    return tables


def _times(bench: dict[str, Any], rows: list[dict[str, Any]], shape: tuple, name: str) -> Table:
    """The fastest of our implementations at each length; a row is a variant and rope mode."""
    level, scale, batch, ragged, dtype, layers = shape
    lengths = sorted({row["length"] for row in rows})
    made = []
    for variant, rope in dict.fromkeys((row["variant"], row["rope"]) for row in rows):
        cells = []
        for length in lengths:
            here = [
                row for row in rows
                if (row["variant"], row["rope"], row["length"]) == (variant, rope, length)
            ]  # fmt: skip
            done = [row for row in here if row["status"] == "measured"]
            if done:
                best = min(done, key=lambda row: row["us"])
                low, high = best["us_first_quartile"] / 1e3, best["us_third_quartile"] / 1e3
                cells.append(Cell(f"{best['us'] / 1e3:.3g} [{low:.3g}, {high:.3g}]"))
            else:
                gap = here[0]["reason"] if here else f"not measured: {length} tokens"
                cells.append(Cell(gap=gap))
        made.append(Row.of(_line(variant, rope), *cells))
    what = {
        "attention": "Attention of one layer", "layer": "An attention layer",
        "step": f"A step of {layers} layers",
    }[level]  # fmt: skip
    tokens = "up to T tokens" if ragged else "T tokens"
    return Table(
        f"{what}: {scale}, batch {batch}, {dtype}, {bench['device']} ({bench['backend']})",
        [Column("variant"), *(Column(f"{length:,}", "ms") for length in lengths)], made,
        caption=f"Milliseconds per step with {tokens} in each cache: median [quartiles] of "
        f"{max(row['samples'] for row in rows)} samples, interleaved; {bench['cores']} cores, "
        f"load {bench['load_average']:.1f}, jax {bench['versions']['jax']}, "
        f"{bench['date'][:10]}.", name=name,
    )  # fmt: skip
