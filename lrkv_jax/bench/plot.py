"""A decode report as a picture: µs per layer and time over MHA's, against tokens in the cache."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lrkv_jax.artefacts.figure import legend_below, panels, style
from lrkv_jax.artefacts.looks import look
from lrkv_jax.bench.decode_table import Row
from lrkv_jax.bench.report import MEASURED
from lrkv_jax.errors import LrkvError

NAIVE = "naive"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the attention rows to a PNG, a column for each scale and batch.

    Each line is the fastest implementation of its variant at each length; the naive bound of LRKV
    and MLA, rebuilding every head's keys and values, is drawn thin. Raises `LrkvError` where there
    is nothing to draw.
    """
    rows = [r for r in report["rows"] if r.status == MEASURED and r.level == "attention"]
    if not rows:
        raise LrkvError("nothing was measured at the level attention: there is nothing to plot")
    columns = sorted({(row.scale, row.batch) for row in rows})
    with style():
        figure = _drawn(report, rows, columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)


def _drawn(report: dict[str, Any], rows: list[Row], columns: list[tuple[str, int]]) -> Figure:
    figure, axes = panels(2, len(columns), panel=(5.2, 3.5), sharex=True, sharey="row")
    lengths = sorted({row.length for row in rows})
    for column, (scale, batch) in zip(zip(*axes, strict=True), columns, strict=True):
        here = [row for row in rows if (row.scale, row.batch) == (scale, batch)]
        _panel(column[0], here, lambda row: row.us)
        _panel(column[1], [r for r in here if r.time_over_mha], lambda row: row.time_over_mha)
        column[1].axhline(1, color="black", linewidth=0.8, zorder=0)
        share = next((r.bytes_over_mha for r in here if r.variant == "lrkv"), None)
        if share:
            column[1].axhline(
                share, color=look("lrkv").colour, linewidth=1.2, linestyle=(0, (1, 2)),
                label="LRKV's bytes over MHA's",
            )  # fmt: skip
        column[0].set_title(f"{scale}, batch {batch}")
        column[1].set_xlabel("cache length, tokens")
    axes[0][0].set_ylabel("attention of one layer, µs")
    axes[1][0].set_ylabel("time over the fastest MHA")
    for axis in figure.axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.minorticks_off()
    for axis in axes[1]:
        axis.set_yticks(ticks := _ticks(axis), [f"{tick:g}" for tick in ticks])
    legend_below(figure)
    ragged = ", ragged lengths" if report["settings"]["ragged"] else ""
    figure.suptitle(
        f"Decode attention on {report['device']} ({report['cores']} cores)"
        # A single column is narrower than the title.
        + (",\n" if len(columns) == 1 else ", ")
        + f"{report['settings']['dtype']}{ragged}, jax {report['versions']['jax']}",
        fontsize=11,
    )
    return figure


def _panel(axis, rows: list[Row], value) -> None:
    for variant, mode, kind in dict.fromkeys((row.variant, row.rope, row.kind) for row in rows):
        line, name = look(kind, mode), variant.upper() + (f", rope {mode}" if mode else "")
        for naive in (False, True):
            if naive and line != look(kind):  # the rebuilt bound of one mode is enough
                continue
            mine = [
                row for row in rows
                if (row.variant, row.rope) == (variant, mode)
                and (row.implementation == NAIVE) == naive
            ]  # fmt: skip
            # Of each length the fastest, which comes last.
            slowest = sorted(mine, key=lambda row: -(row.us or 0))
            best: dict[int, Any] = {row.length: row for row in slowest}
            if not best:
                continue
            fastest = [best[length] for length in sorted(best)]
            # The quartiles, on the scale of what is drawn.
            spread = [
                [value(row) * abs(getattr(row, quartile) / row.us - 1) for row in fastest]
                for quartile in ("us_first_quartile", "us_third_quartile")
            ]
            weight: dict[str, Any] = {"linewidth": 1.8, "markersize": 5.5}
            if naive:
                weight = {"linewidth": 0.9, "alpha": 0.75, "markersize": 4, "mfc": "white"}
            axis.errorbar(
                sorted(best), [value(row) for row in fastest], spread, elinewidth=0.9, capsize=2,
                label=name + ", rebuilt in memory" * naive, **line.style, **weight,
            )  # fmt: skip


def _ticks(axis) -> list[float]:
    low, high = axis.get_ylim()
    steps = [m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5)]
    return [step for step in steps if low <= step <= high]
