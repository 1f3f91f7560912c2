"""A training report's rows, and its tables: for a terminal of 80 columns, and for a page.

One table per shape: the step beside MHA's, and what it holds.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape

from lrkv_jax.lab.bench.report import MEASURED, spread, table, where
from lrkv_jax.lab.bench.variants import name_of
from lrkv_jax.lab.report.tabulated import tabulated

COLUMNS = (
    "variant", "ms", "spread", "tokens/s", "of\nproducts", "of\nsheet", "of MHA:\ntime", "\nFLOPs",
    "peak\nMB",
)  # fmt: skip


@dataclass
class TrainTiming:
    """One variant's training step at one scale and mesh. Bytes are of one device."""

    scale: str
    variant: str
    rope: str | None  # its mode, if it has modes
    layers: int  # that the time is of
    scale_layers: int
    vocabulary: int
    batch: int  # sequences per step
    context: int
    accumulation: int
    remat: str
    dtype: str
    mesh: dict[str, int]
    parameters: int
    flops_per_step: int  # the written formula's
    status: str = MEASURED
    reason: str | None = None  # why it was not measured
    loss: float | None = None  # of the first step, nats per token
    compile_seconds: float | None = None  # of the step, tracing included
    compile_cached: bool | None = None
    state_bytes: int | None = None  # parameters, moments and a batch
    peak_bytes: int | None = None  # of a step, by XLA's analysis
    samples: int = 0
    ms: float | None = None  # median milliseconds of a step
    ms_first_quartile: float | None = None
    ms_third_quartile: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    ceiling_flops_per_second: float | None = None  # of products, all devices together
    mfu_of_ceiling: float | None = None
    mfu_of_datasheet: float | None = None
    time_over_mha: float | None = None  # MHA of the same run and shape
    flops_over_mha: float | None = None

    @property
    def name(self) -> str:
        """mha, lrkv full."""
        return name_of(self.variant, self.rope)

    @property
    def shape(self) -> tuple:
        """What rows must share to be compared."""
        return (
            self.scale, self.layers, self.vocabulary, self.batch, self.context, self.accumulation,
            self.remat, self.dtype, *self.mesh.items(),
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.context


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print tables of what was measured, and every reason why something was not."""
    console.print(f"{where(report)}, {report['devices']} device(s)", highlight=False)
    for title, rows in shapes(report["rows"]):
        console.print(escape(title), style="italic", highlight=False)
        made = table(*COLUMNS)
        for row in rows:
            made.add_row(*map(escape, cells(row)))
        console.print(made)
    for line in reasons(report["rows"]):
        console.print(escape(line), style="dim", highlight=False)
    console.print(
        "Medians of fenced steps, and half the distance between the quartiles. Of products: model "
        "FLOPs per second over those of "
        f"{report['ceiling']['side']:,}-wide products of this run. Of sheet: over the vendor's "
        "peak, where there is one. MB of one device.",
        style="dim",
        highlight=False,
    )


def markdown(report: dict[str, Any], rows: list[TrainTiming]) -> str:
    """The same tables for a page; `rows` are the report's."""
    lines = [
        f"{where(report)}, {report['devices']} device(s), {report['date'][:10]}, "
        f"`{report['command']}`.",
        "",
    ]
    for title, here in shapes(rows):
        lines += [f"**{title}**", ""]
        names = [" ".join(header.split()) for header in COLUMNS]
        lines += [tabulated(names, list(map(cells, here))), ""]
    lines += [f"- {line}" for line in reasons(rows)]
    return "\n".join(lines)


def shapes(rows: list[TrainTiming]) -> list[tuple[str, list[TrainTiming]]]:
    """(title, measured rows) of each shape, in the order of the run."""
    measured = [row for row in rows if row.status == MEASURED]
    return [(_title(same[0]), same) for same in
            (list(group) for _, group in groupby(measured, key=lambda row: row.shape))]  # fmt: skip


def _title(row: TrainTiming) -> str:
    cut = "" if row.layers == row.scale_layers else f" of {row.scale_layers}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items() if size > 1)
    parts = [
        f"{row.scale}: {row.layers}{cut} layers", f"vocabulary {row.vocabulary:,}",
        f"{row.batch} x {row.context:,} tokens per step",
        f"in {row.accumulation} parts" if row.accumulation > 1 else "",
        f"remat {row.remat}" if row.remat != "none" else "", row.dtype, mesh,
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def cells(row: TrainTiming) -> list[str]:
    """One line of the table."""
    return [
        row.name,
        _ms(row.ms),
        spread(row.ms, row.ms_first_quartile, row.ms_third_quartile),
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu_of_ceiling:.1%}",
        "" if row.mfu_of_datasheet is None else f"{row.mfu_of_datasheet:.1%}",
        "" if row.time_over_mha is None else f"{row.time_over_mha:.2f}",
        "" if row.flops_over_mha is None else f"{row.flops_over_mha:.2f}",
        f"{row.peak_bytes / 1e6:,.0f}",
    ]


def reasons(rows: list[TrainTiming]) -> list[str]:
    """One line for each row that was not measured."""
    return [
        f"{row.scale}, {row.name}: {row.status}: {row.reason}"
        for row in rows
        if row.status != MEASURED
    ]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
