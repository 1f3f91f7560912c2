"""Pictures: one style, labelled gaps, and files that are the same each time they are made."""

import io
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.hashsalt": "lrkv",  # ids of the SVG's parts depend on its content alone
}
PNG_DPI = 150
CHARACTERS = 12  # of a title, an inch


@dataclass
class Picture:
    """A figure and what stands under it.

    `name` is added to the artefact's in file names where an artefact has several; `gaps` say what
    the figure has no runs for. It is empty where there is nothing at all to draw: no `figure`, only
    gaps. `drawn` is its SVG, once that was made.
    """

    title: str
    figure: Figure | None
    caption: str = ""
    gaps: list[str] = field(default_factory=list)
    name: str = ""
    drawn: bytes | None = None

    @property
    def empty(self) -> bool:
        return self.figure is None


def style() -> AbstractContextManager:
    """A context in which figures get the common style; `Artefact.made` makes them in it."""
    return matplotlib.rc_context(STYLE)


def panels(
    rows: int = 1, columns: int = 1, *, panel: tuple[float, float] = (4.2, 3.2), **shared
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of equal panels, `panel` inches each; `shared` goes to `Figure.subplots`.

    It belongs to no pyplot state: nothing has to be closed.
    """
    figure = Figure(figsize=(panel[0] * columns, panel[1] * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    return figure, [list(row) for row in axes]


def empty(axis: Axes, text: str) -> None:
    """Turn a panel into a labelled gap, as in "no run: 2.5b mla"."""
    axis.clear()
    axis.grid(False)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(True)
        spine.set_color("#BBBBBB")
        spine.set_linestyle((0, (4, 4)))
    axis.text(
        0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#555555",
        fontsize=9, wrap=True,
    )  # fmt: skip


def mean_and_sd(values: Iterable[Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean and sample standard deviation (None of one) over arrays or numbers, one per seed."""
    stacked = np.stack([np.asarray(value, np.float64) for value in values])
    return stacked.mean(0), stacked.std(0, ddof=1) if len(stacked) > 1 else None


def draw_mean(axis: Axes, x: Any, mean: Any, sd: Any, *, log: bool = False, **style: Any) -> None:
    """Draw a mean with a band of one standard deviation (None: of one value) in its colour.

    On a logarithmic axis (`log`) the band reaches as far below the mean as above it, as the axis
    measures: mean − sd may be 0 or less, which such an axis does not have.
    """
    axis.plot(x, mean, **style)
    if sd is not None:
        lower = mean / (1 + sd / mean) if log else mean - sd
        axis.fill_between(x, lower, mean + sd, color=style["color"], alpha=0.15, lw=0)


def legend_below(figure: Figure, columns: int = 5) -> None:
    """One legend under the panels, each label once, in as many columns as its width has room."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        entry = 0.6 + 0.05 * max(map(len, handles))  # inches, of its text and handle at this size
        columns = min(columns, max(1, int(figure.get_figwidth() / entry)))
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center",
            ncols=min(columns, len(handles)), frameon=False, fontsize=8,
        )  # fmt: skip


def write_picture(picture: Picture, out: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg; the same figure gives the same bytes each time."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}{ending}" for ending in (".png", ".svg")]
    paths[1].write_bytes(svg(picture))
    with style():
        picture.figure.savefig(paths[0], dpi=PNG_DPI, metadata={"Software": None})
    return paths


def svg(picture: Picture) -> bytes:
    """The picture as SVG, drawn once however often it is asked for."""
    if picture.drawn is None:
        buffer = io.BytesIO()
        with style():
            _lay_out(picture)
            picture.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        picture.drawn = buffer.getvalue()
    return picture.drawn


def _lay_out(picture: Picture) -> None:
    """Write the title over the panels, in as many lines as its width needs, and place every part.

    This is done once, because finding the places takes as long as drawing.
    """
    width = int(CHARACTERS * picture.figure.get_figwidth())
    picture.figure.suptitle(textwrap.fill(picture.title, width), fontsize=11)
    picture.figure.draw_without_rendering()
    picture.figure.set_layout_engine("none")
