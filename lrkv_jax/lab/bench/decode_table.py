"""A decode report's rows, and its tables: one per shape, each variant's fastest row in bold.

Narrow enough for 80 columns.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lrkv_jax.lab.bench.report import MEASURED, spread, table, where
from lrkv_jax.lab.bench.variants import name_of


@dataclass
class DecodeTiming:
    """One implementation of one variant at one shape. Times are seconds until they are reported."""

    level: str  # attention or step
    scale: str
    variant: str
    rope: str | None  # its mode, if it has modes
    implementation: str
    batch: int
    length: int  # slots per sequence; the longest one's tokens
    ragged: bool
    tokens: int  # in the cache, over all sequences
    dtype: str
    layers: int = 1  # that the time is of
    status: str = MEASURED
    reason: str | None = None  # why it was not measured
    error: float | None = None  # from the truth, relative
    checked: str | None = None
    samples: int = 0
    us: float | None = None  # median microseconds
    us_first_quartile: float | None = None
    us_third_quartile: float | None = None
    tokens_per_second: float | None = None  # of a whole step alone
    bytes_to_move: int | None = None  # of the cache
    bytes_per_second: float | None = None
    share_of_copy: float | None = None
    time_over_mha: float | None = None  # the fastest MHA at its shape
    bytes_over_mha: float | None = None
    temp_bytes: int | None = None  # the program's temporary memory
    kind: str = ""  # of its variant

    @property
    def name(self) -> str:
        """mha, lrkv full."""
        return name_of(self.variant, self.rope)

    @property
    def shape(self) -> tuple:
        """What rows must share to be compared."""
        return self.level, self.scale, self.batch, self.length, self.ragged, self.layers


TIME_OF = {
    "attention": "a layer's attention alone",
    "step": "a step of {layers} layers and the head",
}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print tables of what was measured, and every reason why something was not."""
    copy = report["copy_bytes_per_second"]
    console.print(
        f"{where(report)}; copies at {copy['median'] / 1e9:.1f} GB/s",
        highlight=False,
    )
    rows = [row for row in report["rows"] if row.status == MEASURED]
    for shape, same in groupby(sorted(rows, key=_place), key=lambda row: row.shape):
        console.print(_title(shape), style="italic", highlight=False)
        console.print(_table(shape, list(same)))
    for line in _reasons(report["rows"]):
        console.print(line, style="dim", highlight=False)
    console.print(
        f"Medians, and half the distance between the quartiles; a call's dispatch, "
        f"{report['dispatch_us']:.0f} µs, is in them. "
        "MB: cache bytes up to each length. Of copy: those bytes per second over a jitted copy's. "
        "Of MHA: the time over the fastest MHA timed together with it at the same shape, and the "
        "bytes.",
        style="dim",
        highlight=False,
    )


def _place(row: DecodeTiming) -> tuple:
    # A stable sort: within a shape the variants stay in the order of the run.
    return row.level, row.scale, row.batch, row.length


def _title(shape: tuple) -> str:
    level, scale, batch, length, ragged, layers = shape
    lengths = f"ragged, up to {length:,}" if ragged else f"{length:,}"
    what = TIME_OF[level].format(layers=layers)
    return f"{escape(scale)}, batch {batch}, {lengths} tokens: {what}"


def _table(shape: tuple, rows: list[DecodeTiming]) -> Table:
    level = shape[0]
    # A step also reads weights: its cache bytes alone are no bandwidth.
    rate = "of\ncopy" if level == "attention" else "tokens/s"
    made = table(
        "variant", "by", "µs", "spread", "MB", rate, "of MHA:\ntime", "\nbytes", "temp\nMB", left=2
    )
    fastest: dict[str, float] = {}
    for row in rows:
        fastest[row.name] = min(row.us, fastest.get(row.name, row.us))
    for row in rows:
        if level == "attention":
            rate = f"{100 * row.share_of_copy:.0f} %"
        else:
            rate = f"{row.tokens_per_second:,.1f}"
        made.add_row(
            escape(row.name),
            row.implementation,
            f"{row.us:,.0f}" if row.us >= 100 else f"{row.us:.1f}",
            spread(row.us, row.us_first_quartile, row.us_third_quartile),
            _megabytes(row.bytes_to_move),
            rate,
            "" if row.time_over_mha is None else f"{row.time_over_mha:.2f}",
            "" if row.bytes_over_mha is None else f"{row.bytes_over_mha:.2f}",
            _megabytes(row.temp_bytes),
            style="bold" if row.us == fastest[row.name] else "dim",
        )
    return made


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.1f}"


def _reasons(rows: list[DecodeTiming]) -> list[str]:
    """One line for each thing that kept rows from being measured, however many."""
    kept = Counter(
        (row.implementation, row.status, row.reason) for row in rows if row.status != MEASURED
    )
    return [
        f"{implementation}: {status} {count} row{'s' * (count > 1)}: {reason}"
        for (implementation, status, reason), count in kept.items()
    ]
