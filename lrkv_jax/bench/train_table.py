"""A training report as tables: for a terminal of 80 columns, and for a page.

Two tables a shape: the step beside MHA's, and where its time goes.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lrkv_jax.bench.report import MEASURED
from lrkv_jax.bench.table import spread, where
from lrkv_jax.bench.train_rows import Row

STEP = ("variant", "ms", "spread", "tokens/s", "of products", "of sheet", "of MHA: time", "FLOPs")
PARTS = (
    "variant", "forward", "backward", "optim.", "call", "data", "compile s", "state MB",
    "peak MB",
)  # fmt: skip


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print tables of what was measured, and every reason why something was not."""
    console.print(f"{where(report)}, {report['devices']} device(s)", highlight=False)
    for title, rows in shapes(report["rows"]):
        console.print(escape(title), style="italic", highlight=False)
        for headers, cells in ((STEP, step_cells), (PARTS, part_cells)):
            table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
            for header in headers:
                left = header == "variant"
                table.add_column(header, justify="left" if left else "right", no_wrap=left)
            for row in rows:
                table.add_row(*map(escape, cells(row)))
            console.print(table)
    for line in reasons(report["rows"]):
        console.print(escape(line), style="dim", highlight=False)
    if report["loop"] is not None:
        console.print(loop_sentence(report["loop"]), highlight=False)
    console.print(
        "Medians of fenced steps, and half the distance between the quartiles. Milliseconds: "
        "forward is the loss alone, backward the gradient without it, optimizer the step without "
        "the gradient; call, within the step, is until its dispatch returns; data is reading a "
        "batch and putting it on the devices. Of products: model FLOPs a second over those of "
        f"{report['ceiling']['side']:,}-wide products of this run. Of sheet: over the vendor's "
        "peak, where there is one. MB of one device.",
        style="dim",
        highlight=False,
    )


def markdown(report: dict[str, Any], rows: list[Row]) -> str:
    """The same tables for a page; `rows` are the report's."""
    lines = [
        f"{where(report)}, {report['devices']} device(s), {report['date'][:10]}, "
        f"`{report['command']}`.",
        "",
    ]
    for title, here in shapes(rows):
        lines += [f"**{title}**", ""]
        for headers, cells in ((STEP, step_cells), (PARTS, part_cells)):
            lines.append("| " + " | ".join(headers) + " |")
            lines.append("|---" * len(headers) + "|")
            lines += ["| " + " | ".join(cells(row)) + " |" for row in here]
            lines.append("")
    lines += [f"- {line}" for line in reasons(rows)]
    if report["loop"] is not None:
        lines += ["", loop_sentence(report["loop"])]
    return "\n".join(lines)


def shapes(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """(title, measured rows) of each shape, in the order of the run."""
    measured = [row for row in rows if row.status == MEASURED]
    return [(_title(same[0]), same) for same in
            (list(group) for _, group in groupby(measured, key=lambda row: row.shape))]  # fmt: skip


def _title(row: Row) -> str:
    cut = "" if row.layers == row.scale_layers else f" of {row.scale_layers}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items() if size > 1)
    parts = [
        f"{row.scale}: {row.layers}{cut} layers", f"vocabulary {row.vocabulary:,}",
        f"{row.batch} x {row.context:,} tokens a step",
        f"in {row.accumulation} parts" if row.accumulation > 1 else "",
        f"remat {row.remat}" if row.remat != "none" else "", row.dtype, mesh,
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def step_cells(row: Row) -> list[str]:
    """One line of the table of steps."""
    return [
        row.name,
        _ms(row.ms),
        spread(row.ms, row.ms_first_quartile, row.ms_third_quartile),
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu_of_ceiling:.1%}",
        "" if row.mfu_of_datasheet is None else f"{row.mfu_of_datasheet:.1%}",
        "" if row.time_over_mha is None else f"{row.time_over_mha:.2f}",
        "" if row.flops_over_mha is None else f"{row.flops_over_mha:.2f}",
    ]


def part_cells(row: Row) -> list[str]:
    """One line of the table of parts."""
    return [
        row.name,
        *(_ms(part) for part in (row.forward_ms, row.backward_ms, row.optimizer_ms, row.host_ms)),
        "" if row.data_ms is None else _ms(row.data_ms),
        f"{row.compile_seconds:.1f}" + (" (cached)" if row.compile_cached else ""),
        f"{row.state_bytes / 1e6:,.0f}",
        f"{row.peak_bytes / 1e6:,.0f}",
    ]


def loop_sentence(loop: dict[str, Any]) -> str:
    """What the loop costs the host, in words."""
    return (
        f"The training loop around {loop['scale']}'s tree ({loop['layers']} layers, "
        f"{loop['arrays']} arrays) with next to nothing to compute: {loop['ms']:.2f} ms a step "
        f"outside the device ({loop['ms_first_quartile']:.2f} to "
        f"{loop['ms_third_quartile']:.2f}), {loop['cpu_ms']:.2f} ms of the main thread's processor "
        "time."
    )


def reasons(rows: list[Row]) -> list[str]:
    """One line for each row that was not measured."""
    return [
        f"{row.scale}, {row.name}: {row.status}: {row.reason}"
        for row in rows
        if row.status != MEASURED
    ]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
