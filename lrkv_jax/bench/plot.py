"""A decode report as a picture: µs a layer and time over MHA's, against the tokens in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrkv_jax.artefacts.looks import LOOKS
from lrkv_jax.bench.report import MEASURED, Row
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
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    columns = sorted({(row.scale, row.batch) for row in rows})
    figure, axes = plt.subplots(
        2, len(columns), figsize=(1.6 + 4.2 * len(columns), 7.4), sharex=True, sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for column, (scale, batch) in zip(axes.T, columns, strict=True):
        here = [row for row in rows if (row.scale, row.batch) == (scale, batch)]
        _panel(column[0], here, lambda row: row.us)
        _panel(column[1], [r for r in here if r.time_over_mha], lambda row: row.time_over_mha)
        column[1].axhline(1, color="black", linewidth=0.8, zorder=0)
        share = next((r.bytes_over_mha for r in here if r.variant == "lrkv"), None)
        if share:
            column[1].axhline(
                share, color=LOOKS["lrkv full"].colour, linewidth=1.2, linestyle=(0, (1, 2)),
                label="LRKV's bytes over MHA's",
            )  # fmt: skip
        column[0].set_title(f"{scale}, batch {batch}", fontsize=10)
        column[1].set_xlabel("cache length, tokens")
    axes[0][0].set_ylabel("attention of one layer, µs")
    axes[1][0].set_ylabel("time over the fastest MHA")
    for axis in axes.flat:
        lengths = sorted({row.length for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.grid(True, color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[1]:
        axis.set_yticks(ticks := _ticks(axis), [f"{tick:g}" for tick in ticks])
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center",
        ncols=min(5, 1 + 2 * len(columns)), frameon=False, fontsize=8,
    )  # fmt: skip
    ragged = ", ragged lengths" if report["settings"]["ragged"] else ""
    figure.suptitle(
        f"Decode attention on {report['device']} ({report['cores']} cores)"
        # A single column is narrower than the title.
        + (",\n" if len(columns) == 1 else ", ")
        + f"{report['settings']['dtype']}{ragged}, jax {report['versions']['jax']}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _panel(axis, rows: list[Row], value) -> None:
    for name, variant in LOOKS.items():
        for naive in (False, True):
            mine = [r for r in rows if r.name == name and (r.implementation == NAIVE) == naive]
            if naive and name not in ("mla", "lrkv full"):
                continue
            best = {}
            for row in mine:
                if row.length not in best or row.us < best[row.length].us:
                    best[row.length] = row
            lengths = sorted(best)
            if not lengths:
                continue
            look = {"linewidth": 0.9, "alpha": 0.75, "markersize": 4, "markerfacecolor": "white"}
            if not naive:
                look = {"linewidth": 1.8, "markersize": 5.5}
            label = variant.name + (", rebuilt in memory" if naive else "")
            median = [value(best[n]) for n in lengths]
            # The quartiles, on the scale of what is drawn.
            spread = [
                [m * abs(quartile / best[n].us - 1) for m, n, quartile in zip(
                    median, lengths, quartiles, strict=True)]
                for quartiles in (
                    [best[n].us_first_quartile for n in lengths],
                    [best[n].us_third_quartile for n in lengths],
                )
            ]  # fmt: skip
            axis.errorbar(
                lengths, median, spread, label=label, elinewidth=0.9, capsize=2,
                **variant.style, **look,
            )  # fmt: skip


def _ticks(axis) -> list[float]:
    low, high = axis.get_ylim()
    steps = [m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5)]
    return [step for step in steps if low <= step <= high]
