"""A decode report as a picture: time over MHA's against tokens in the cache, and against bytes."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench.decode_table import Row
from lrkv_jax.lab.bench.report import MEASURED
from lrkv_jax.lab.report.figures import legend_below, panels, style
from lrkv_jax.lab.report.styles import variant_style

NAIVE = "naive"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the attention rows to a PNG, a column for each scale and batch.

    Above, the time of each variant's fastest implementation over MHA's at each length; the naive
    bound of LRKV and MLA, rebuilding every head's keys and values, is drawn thin. Below, at the
    longest length, that time beside the bytes of the cache over MHA's: the two would be equal if
    bytes were all that a step costs. Raises `LrkvError` where there is nothing to draw.
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
    figure, axes = panels(2, len(columns), panel=(5.2, 3.2), sharey="row")
    lengths = sorted({row.length for row in rows})
    lines = dict.fromkeys((row.variant, row.rope, row.kind) for row in rows)
    for (above, below), (scale, batch) in zip(zip(*axes, strict=True), columns, strict=True):
        here = [row for row in rows if (row.scale, row.batch) == (scale, batch)]
        here = [row for row in here if row.time_over_mha is not None]
        _against_length(above, here)
        above.axhline(1, color="black", linewidth=0.8, zorder=0)
        above.set_title(f"{scale}, batch {batch}")
        above.set_xlabel("cache length, tokens")
        above.set_xscale("log", base=2)
        above.set_yscale("log")
        above.set_xticks(lengths, [f"{n:,}" for n in lengths])
        _beside_bytes(below, [row for row in here if row.length == lengths[-1]], list(lines))
        below.set_xlabel(f"over the fastest MHA, at {lengths[-1]:,} tokens")
    axes[0][0].set_ylabel("time over the fastest MHA")
    for axis in axes[0]:
        axis.minorticks_off()
    for axis in axes[0]:
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


def _fastest(rows: list[Row], variant: str, mode: str | None, *, naive: bool) -> dict[int, Row]:
    """Of each length, a variant's fastest row; of the naive implementation, or of the others."""
    mine = [
        row for row in rows
        if (row.variant, row.rope) == (variant, mode) and (row.implementation == NAIVE) == naive
    ]  # fmt: skip
    slowest = sorted(mine, key=lambda row: -(row.us or 0))
    best = {row.length: row for row in slowest}
    return {length: best[length] for length in sorted(best)}


def _named(variant: str, mode: str | None) -> str:
    return variant.upper() + (f", rope {mode}" if mode else "")


def _against_length(axis, rows: list[Row]) -> None:
    for variant, mode, kind in dict.fromkeys((row.variant, row.rope, row.kind) for row in rows):
        line = variant_style(kind, mode)
        for naive in (False, True):
            if naive and line != variant_style(kind):  # the rebuilt bound of one mode is enough
                continue
            best = _fastest(rows, variant, mode, naive=naive)
            if not best:
                continue
            # The quartiles, on the scale of what is drawn.
            spread = [
                [
                    (row.time_over_mha or 0) * abs(getattr(row, quartile) / row.us - 1)
                    for row in best.values()
                ]
                for quartile in ("us_first_quartile", "us_third_quartile")
            ]
            weight: dict[str, Any] = {"linewidth": 1.8, "markersize": 5.5}
            if naive:
                weight = {"linewidth": 0.9, "alpha": 0.75, "markersize": 4, "mfc": "white"}
            axis.errorbar(
                list(best), [row.time_over_mha for row in best.values()], spread, elinewidth=0.9,
                capsize=2, label=_named(variant, mode) + ", rebuilt in memory" * naive,
                **line.plot, **weight,
            )  # fmt: skip


def _beside_bytes(axis, rows: list[Row], lines: list[tuple[str, str | None, str]]) -> None:
    """A row for each variant: a full marker at its time, an empty one at its bytes."""
    for place, (variant, mode, kind) in enumerate(lines):
        for row in _fastest(rows, variant, mode, naive=False).values():
            style = variant_style(kind, mode)
            color, marker = style.color, style.marker
            both = [row.bytes_over_mha, row.time_over_mha]
            axis.plot(both, [place, place], color=color, linewidth=1.2, zorder=1)
            axis.plot(both[:1], [place], marker, color=color, markersize=7, mfc="white")
            axis.plot(both[1:], [place], marker, color=color, markersize=7)
            side = 1 if row.time_over_mha >= row.bytes_over_mha else -1
            axis.annotate(
                f"{row.time_over_mha:.2f}", (row.time_over_mha, place), xytext=(7 * side, 0),
                textcoords="offset points", va="center", ha="left" if side > 0 else "right",
                fontsize=8,
            )  # fmt: skip
    axis.axvline(1, color="black", linewidth=0.8, zorder=0)
    axis.set_yticks(range(len(lines)), [_named(*line[:2]) for line in lines])
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlim(-0.06, 1.12 * max(axis.get_xlim()[1], 1.1))
    for filled, says in ((False, "bytes of the cache"), (True, "time, with its figure")):
        axis.plot(
            [], [], "o", color="#555555", markersize=6, mfc="#555555" if filled else "white",
            label=f"below: {says}",
        )  # fmt: skip


def _ticks(axis) -> list[float]:
    low, high = axis.get_ylim()
    steps = [m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5)]
    return [step for step in steps if low <= step <= high]
