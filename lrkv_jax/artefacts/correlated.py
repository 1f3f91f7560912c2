"""Variants' scores against their bits per byte, with how much the one tells of the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lrkv_jax.artefacts.looks import GREY, look
from lrkv_jax.comparison import Correlation, correlation, spread

# A variant: its kind, its name, and by seed its bits a byte and its scores in per cent.
Point = tuple[str, str, Sequence[float], Sequence[float]]


def correlated(axis: Axes, title: str, points: Sequence[Point]) -> Correlation | None:
    """Draws means over seeds, bars of one standard deviation, the least-squares line and R².

    Returns the correlation of the means; None of fewer than 3 points.
    """
    for kind, label, bits, scores in points:
        one, across, up = look(kind), spread(bits), spread(scores)
        axis.errorbar(
            across.mean, up.mean, xerr=across.sd, yerr=up.sd, label=label, capsize=3,
            **one.style | {"linestyle": "none"},
        )  # fmt: skip
    x = [spread(bits).mean for _, _, bits, _ in points]
    y = [spread(scores).mean for *_, scores in points]
    found = correlation(x, y)
    if found:
        ends = np.array([min(x), max(x)])
        slope, at_zero = np.polyfit(x, y, 1)
        axis.plot(ends, slope * ends + at_zero, color=GREY, lw=1, ls="--", zorder=1)
    axis.set_title(f"{title}\n{found.in_words if found else 'too few variants to correlate'}")
    axis.invert_xaxis()
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.margins(0.12)
    axis.set_xlabel("pretraining bits/byte (better to the right)")
    axis.set_ylabel("combined score, %")
    return found
