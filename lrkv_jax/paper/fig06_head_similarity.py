"""Figures 6 and 18: heat maps of the cosines of heads at an early, a middle and a late layer.

Two pictures for each scale: of heads' forms, as in the paper, and of their logits on held-out text,
which needs `lrkv analyze RUN... --batches 4`. A row for each variant at its lowest seed, one scale
of colours in each picture.
"""

from collections.abc import Callable

import numpy as np
from matplotlib import colormaps

from lrkv_jax.artefacts.analysed import TEXTLESS, Group, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, empty, panels

TITLE = "Similarity of heads"
_WRITTEN = 8  # heads, up to which a cell's value is written in it
_LEAST = 0.1  # the least range of the colours, so that rounding is not painted


@artefact("Figures 6 and 18", TITLE, reads="analyses")
def fig06_head_similarity(runs):
    return pictures(runs, TITLE, _pictures)


def _pictures(group: Group) -> list[Picture]:
    """The maps of forms, and those of logits."""
    if group.heads == 1:
        return [Picture(TITLE, None, gaps=[f"one head, nothing to compare: {group.name}"])]
    seeds = ", ".join(f"{line.label}: {min(line.runs)}" for line in group.lines)
    forms = _maps(group, lambda analysis: analysis["query_key"], "cosine of two heads' forms")
    forms.caption = (
        "Cosines of query–key forms A_h = W^Q_h (W^K_h)ᵀ at the lowest seed of each variant "
        f"({seeds}). The diagonal, 1 in each, is left white; one scale of colours for all panels, "
        "lighter is more alike."
    )
    logits = _maps(group, lambda analysis: analysis.get("logits"), "cosine of two heads' logits")
    logits.title, logits.name = "Similarity of heads' logits on held-out text", "logits"
    logits.caption = (
        "The same heads by what softmax sees: cosines of their logits on held-out text, with RoPE "
        "and QK-norm, over all pairs of a query and a key that it may attend to, each query's "
        "logits less their mean. The mean of a panel is over pairs of different heads. The colours "
        "are not those of the forms."
    )
    return [forms, logits]


def _maps(group: Group, of: Callable[[dict], dict | None], name: str) -> Picture:
    """A row for each variant, a column for an early, a middle and a late layer.

    `of` gives what has `per_layer` grams, or None of runs that were analysed without.
    """
    found = [(line, of(line.first)) for line in group.lines]
    gaps = [f"{TEXTLESS}: {group.name} {line.label}" for line, has in found if not has]
    if len(gaps) == len(found):
        return Picture(TITLE, None, gaps=gaps)
    figure, axes = panels(len(found), len(group.depths), panel=(2.15, 2.15))
    grams = [
        [_off_diagonal(has["per_layer"][place]) for place in group.depths.values()] if has else []
        for _, has in found
    ]
    low = min(0.0, min(gram.min() for row in grams for gram in row))
    high = max(low + _LEAST, max(gram.max() for row in grams for gram in row))
    colours = colormaps["cividis"].with_extremes(bad="#FFFFFF")
    for y, line in enumerate(group.lines):
        for x, depth in enumerate(group.depths):
            axis, title = axes[y][x], "analysed without text"
            if not grams[y]:
                empty(axis, title)
            else:
                gram = grams[y][x]
                image = axis.imshow(gram, cmap=colours, vmin=low, vmax=high, origin="upper")
                _head_ticks(axis, group.heads, outer=(x == 0, y == len(grams) - 1))
                title = f"mean {gram.mean():.3f}".replace("-", "−")
                if group.heads <= _WRITTEN:
                    _write(axis, gram, (low, high))
            axis.set_title(f"{group.depth_title(depth)}\n{title}" if y == 0 else title, fontsize=8)
            if x == 0:
                axis.set_ylabel(f"{line.label}\nhead", fontsize=9)
    bar = figure.colorbar(
        image, ax=[axis for row in axes for axis in row], fraction=0.05, aspect=40, pad=0.02
    )
    bar.set_label(name)
    return Picture(TITLE, figure, gaps=gaps)


def _off_diagonal(layer) -> np.ma.MaskedArray:
    gram = np.array(layer["gram"])
    return np.ma.masked_array(gram, np.eye(len(gram), dtype=bool))


def _head_ticks(axis, heads, outer) -> None:
    axis.grid(False)
    every = 1 if heads <= _WRITTEN else int(np.ceil(heads / 6))
    ticks = np.arange(0, heads, every)
    for one, shown in ((axis.yaxis, outer[0]), (axis.xaxis, outer[1])):
        one.set_ticks(ticks, [str(tick + 1) for tick in ticks] if shown else [""] * len(ticks))
        one.set_tick_params(labelsize=7, length=2)
    if outer[1]:
        axis.set_xlabel("head")


def _write(axis, gram, limits) -> None:
    low, high = limits
    for (y, x), value in np.ndenumerate(gram.filled(np.nan)):
        if x != y:
            text = f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")
            dark = (value - low) / (high - low) < 0.55
            axis.text(
                x, y, "0" if text in (".00", "−.00") else text, ha="center", va="center",
                fontsize=6.5, color="white" if dark else "black", in_layout=False,
            )  # fmt: skip
