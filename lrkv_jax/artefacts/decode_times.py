"""Decode benchmarks (`lrkv bench decode`) as tables of milliseconds against tokens in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.table import Cell, Column, Row, Table


def line(variant: str, rope: str | None) -> str:
    """What a row is called."""
    return f"{name_of(variant)}, rope {rope}" if rope else name_of(variant)


def times(
    reports: Sequence[dict[str, Any]], lines: Sequence[tuple[str, str | None]]
) -> list[Table]:
    """A table for each shape that the reports measured, and gaps for a GPU if none did.

    `lines` are the variants, each with its rope mode or None, that a GPU's table would have.
    """
    tables = []
    for report in reports:
        rows = [row for row in report["rows"] if row["implementation"] in ("xla", "mosaic")]
        shapes = dict.fromkeys(
            (r["level"], r["scale"], r["batch"], r["ragged"], r["dtype"], r["layers"]) for r in rows
        )
        for shape in shapes:
            table = _times(report, rows, shape)
            table.name = f"ms_{len(tables) + 1}"
            tables.append(table)
    if not any(report["backend"] == "gpu" for report in reports):
        gap = Cell(gap="no GPU measurement: lrkv bench decode there, then --bench FILE.json")
        lengths = [Column(f"{n:,}", "ms") for n in (512, 2048, 8192, 32768)]
        table = Table("Time on a GPU", [Column("variant"), *lengths],
                      [Row.of(line(*one), *[gap] * 4) for one in lines], name="ms_gpu")  # fmt: skip
        tables.append(table)
    return tables


def _times(report: dict[str, Any], rows: list[dict[str, Any]], shape: tuple) -> Table:
    """The fastest of our implementations at each length; a row is a variant and rope mode."""
    level, scale, batch, ragged, dtype, layers = shape
    keys = ("level", "scale", "batch", "ragged", "dtype", "layers")
    rows = [row for row in rows if tuple(row[key] for key in keys) == shape]
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
                cells.append(Cell(gap=here[0]["reason"] if here else f"not asked: {length} tokens"))
        made.append(Row.of(line(variant, rope), *cells))
    what = {
        "attention": "Attention of one layer", "layer": "An attention layer",
        "step": f"A step of {layers} layers",
    }[level]  # fmt: skip
    tokens = "up to T tokens" if ragged else "T tokens"
    return Table(
        f"{what}: {scale}, batch {batch}, {dtype}, {report['device']} ({report['backend']})",
        [Column("variant"), *(Column(f"{length:,}", "ms") for length in lengths)], made,
        caption=f"Milliseconds a step with {tokens} in each cache: median [quartiles] of "
        f"{max(row['samples'] for row in rows)} samples, interleaved; {report['cores']} cores, "
        f"load {report['load_average']:.1f}, jax {report['versions']['jax']}, "
        f"{report['date'][:10]}.",
    )  # fmt: skip
