"""A decode report as a picture: time over MHA's against the tokens in the cache."""

from pathlib import Path
from typing import Any

from lrkv_jax.lab.bench.decode_table import DecodeTiming
from lrkv_jax.lab.bench.report import MEASURED
from lrkv_jax.lab.report.figures import legend_below, panels, style
from lrkv_jax.lab.report.styles import variant_style


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw the attention rows to a PNG, a panel for each scale and batch.

    It shows the time of each variant's fastest implementation over the fastest MHA's at each
    length, with its quartiles, and the bytes of its cache over MHA's as an empty marker: the two
    would be equal if bytes were all that a step costs. Returns whether there was something to draw.
    """
    rows = [r for r in report["rows"] if r.status == MEASURED and r.level == "attention"]
    if not rows:
        return False
    columns = sorted({(row.scale, row.batch) for row in rows})
    with style():
        figure, axes = panels(1, len(columns), panel=(5.2, 3.2), sharey="row")
        for axis, (scale, batch) in zip(axes[0], columns, strict=True):
            here = [row for row in rows if (row.scale, row.batch) == (scale, batch)]
            _draw_panel(axis, [row for row in here if row.time_over_mha is not None])
            axis.set_title(f"{scale}, batch {batch}")
        axes[0][0].set_ylabel("over the fastest MHA")
        axes[0][0].plot([], [], "o", color="#555555", mfc="white", label="bytes of the cache")
        legend_below(figure)
        figure.suptitle(_title(report, narrow=len(columns) == 1), fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    return True


def _draw_panel(axis, rows: list[DecodeTiming]) -> None:
    lengths = sorted({row.length for row in rows})
    for variant, rope, kind in dict.fromkeys((row.variant, row.rope, row.kind) for row in rows):
        best = _fastest([row for row in rows if (row.variant, row.rope) == (variant, rope)])
        spread = [
            [row.time_over_mha * abs(getattr(row, quartile) / row.us - 1) for row in best]
            for quartile in ("us_first_quartile", "us_third_quartile")
        ]
        line = variant_style(kind, rope)
        axis.errorbar(
            [row.length for row in best], [row.time_over_mha for row in best], spread,
            elinewidth=0.9, capsize=2, label=variant.upper() + (f", rope {rope}" if rope else ""),
            **line.plot,
        )  # fmt: skip
        axis.plot(
            [row.length for row in best], [row.bytes_over_mha for row in best],
            line.marker, color=line.color, mfc="white",
        )  # fmt: skip
    axis.axhline(1, color="black", linewidth=0.8, zorder=0)
    axis.set_xlabel("cache length, tokens")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.set_ylim(bottom=0)


def _fastest(rows: list[DecodeTiming]) -> list[DecodeTiming]:
    """The fastest row of each length."""
    best: dict[int, DecodeTiming] = {}
    for row in rows:
        best[row.length] = min(best.get(row.length, row), row, key=lambda row: row.us or 0)
    return [best[length] for length in sorted(best)]


def _title(report: dict[str, Any], *, narrow: bool) -> str:
    ragged = ", ragged lengths" if report["settings"]["ragged"] else ""
    return (
        f"Decode attention on {report['device']} ({report['cores']} cores)"
        + (",\n" if narrow else ", ")
        + f"{report['settings']['dtype']}{ragged}, jax {report['versions']['jax']}"
    )
