"""Pictures: one style, and files that are the same each time they are made."""

import io
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from lrkv_jax.lab.report.comparison.contrasts import mean_and_sd

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
    """A figure and its caption.

    `name` is added to the item's in file names where an item has several. `drawn` is its SVG, once
    that was made.
    """

    title: str
    figure: Figure
    caption: str = ""
    name: str = ""
    drawn: bytes | None = None


def style() -> AbstractContextManager:
    """A context in which figures get the common style; `ReportItem.made` makes them in it."""
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


def draw_mean(axis: Axes, x: Any, values: Iterable[Any], **style: Any) -> None:
    """Draw the mean over seeds of curves, with a band of one standard deviation in its color."""
    mean, sd = mean_and_sd(values)
    axis.plot(x, mean, **style)
    if sd is not None:
        axis.fill_between(x, mean - sd, mean + sd, color=style["color"], alpha=0.15, lw=0)


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
    """The picture as SVG, drawn once however often it is used."""
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
