"""Plot what serving gains: each ratio with its range, what was asked, and what bounds it."""

import textwrap
from pathlib import Path
from typing import Any

from lrkv_jax.artefacts.figure import legend_below, panels, style
from lrkv_jax.artefacts.looks import GREY

# Okabe and Ito's, as in every picture: the yardstick, the second variant, one over the other.
LOOKS = (("#000000", "o"), ("#D55E00", "D"), ("#0072B2", "s"))
WIDE = 46  # characters of a label's line


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the rows of `bench.serve.run` to a PNG, a line for each ratio, on a common log axis.

    A marker is a variant's median, and its line reaches from the least to the most of the samples.
    A grey triangle stands at the value that was asked for and points to where it is met; an empty
    marker is the ratio if nothing but the device took time.
    """
    rows = report["rows"]
    first, second = report["settings"]["variants"]
    looks = dict(zip((first, second, f"{second} over {first}"), LOOKS, strict=True))
    ratios = list(dict.fromkeys(row.what for row in rows))
    with style():
        figure, ((axis,),) = panels(panel=(8.5, 0.42 * len(ratios) + 1))
        for row in rows:
            here = [other for other in rows if other.what == row.what]
            place = ratios.index(row.what) + 0.34 * (here.index(row) - (len(here) - 1) / 2)
            colour, marker = looks[row.variant]
            axis.plot([row.least, row.most], [place, place], color=colour, linewidth=1.2)
            axis.plot(row.ratio, place, marker, color=colour, markersize=5, label=row.variant)
            if row.reach is not None:
                sign, _, asked = row.reach.partition(" ")
                axis.plot(
                    float(asked), place, ">" if sign == "≥" else "<", color=GREY, markersize=6,
                    label="asked, and the side on which it is met", zorder=1,
                )  # fmt: skip
            if row.bound is not None:
                axis.plot(
                    row.bound, place, marker, mfc="white", color=colour, markersize=5,
                    label="at best" if row is here[0] else None,
                )  # fmt: skip
        axis.axvline(1, color="black", linewidth=0.8, zorder=0)
        axis.set_yticks(range(len(ratios)), [textwrap.fill(ratio, WIDE) for ratio in ratios])
        axis.set_ylim(len(ratios) - 0.4, -0.6)
        axis.set_xscale("log")
        ticks = [m * 10.0**e for e in (-2, -1, 0, 1) for m in (1, 2, 5)]
        low, high = axis.get_xlim()
        shown = [tick for tick in ticks if low <= tick <= high]
        axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axis.minorticks_off()
        axis.set_xlabel("ratio")
        legend_below(figure)
        figure.suptitle(
            f"What serving gains on {report['device']} ({report['cores']} cores),\n"
            f"{report['settings']['scale']}, random weights, {report['settings']['dtype']}, "
            f"jax {report['versions']['jax']}",
            fontsize=11,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
