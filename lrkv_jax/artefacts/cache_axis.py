"""Losses against what the cache holds: what figures 3 and 5 have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from lrkv_jax.artefacts.looks import Look
from lrkv_jax.comparison import RunRecord, spread

CACHE_LABEL = "KV cache, % of MHA's bytes"
CACHE_NOTE = (
    "Cache share: by the formula, of a bfloat16 cache with LRKV's float32 inverse norms and MLA's "
    "rope key, which the paper's shares leave out."
)


def against_cache(
    axis: Axes,
    look: Look,
    points: Sequence[Mapping[int, RunRecord]],
    loss: str,
    *,
    marks: Sequence[str] = (),
    above: bool = False,
) -> None:
    """Points of finished runs by seed: the mean of their `loss` (an attribute of `RunRecord`).

    Error bars are one standard deviation over seeds; several points are joined from the smallest
    cache to the largest. `marks` are written `above` their bars, or below.
    """
    rows = []
    for place, runs in enumerate(points):
        over = spread([getattr(run, loss) for run in runs.values()])
        share = 100 * next(iter(runs.values())).cache_bytes_fraction
        rows.append((share, over.mean, over.sd, marks[place] if marks else ""))
    rows.sort(key=lambda row: row[0])
    shares, means, sds, _ = zip(*rows, strict=True)
    bars = None if set(sds) == {None} else [sd or 0.0 for sd in sds]
    style = look.style if len(rows) > 1 else look.style | {"linestyle": "none"}
    axis.errorbar(shares, means, yerr=bars, capsize=3, label=look.name, **style)
    axis.margins(y=0.15)  # room for the marks
    side = 1 if above else -1
    for share, mean, sd, mark in rows:
        axis.annotate(
            mark, (share, mean + side * (sd or 0.0)), xytext=(0, 6 * side),
            textcoords="offset points", ha="center", va="bottom" if above else "top", fontsize=7,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip
