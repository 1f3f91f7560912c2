"""One HTML page that needs no other file: runs, tables, pictures, and what is missing."""

import base64
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lrkv_jax import __version__
from lrkv_jax.lab.report.comparison import RunRecord, every_setting
from lrkv_jax.lab.report.figures import Picture, svg
from lrkv_jax.lab.report.items import Made, ReportItem
from lrkv_jax.lab.report.renderers import html
from lrkv_jax.lab.report.tables import Column, Table, TableRow

_PACKAGES = ("jax", "flax", "optax", "numpy", "scipy", "matplotlib")


@dataclass(frozen=True)
class Section:
    """An item of the report and what was made of it."""

    item: ReportItem
    made: Sequence[Made]


def write_page(
    path: Path,
    title: str,
    items: Sequence[ReportItem],
    runs: Sequence[RunRecord],
    *,
    broken: Mapping[Path, str] = MappingProxyType({}),
    benches: Sequence[dict[str, Any]] = (),
    progress: Callable[[str, float, int], None] = lambda name, done, total: None,
) -> list[Section]:
    """Make items of runs and decode benchmarks: their files, and the page, beside one another.

    `broken` are {directory: reason} of runs that were left out. `progress` is called with a
    description, the number done and the number of all.
    """
    sections = []
    for done, item in enumerate(items):
        progress("tables and figures", done, len(items))
        made = item.made(runs, benches)
        item.write(made, path.parent)
        sections.append(Section(item, made))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, sections, runs, broken), encoding="utf-8")
    progress("tables and figures", len(items), len(items))
    return sections


def page(
    title: str,
    sections: Sequence[Section],
    runs: Sequence[RunRecord],
    broken: Mapping[Path, str] = MappingProxyType({}),
) -> str:
    """The page as HTML: pictures inlined as SVG, no link that leaves it, readable when printed."""
    shown = [section for section in sections if section.made]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").render(
        title=title,
        runs=runs_table(runs),
        seeds=len({run.seed for run in runs}),
        broken=broken,
        groups=[(name, list(some)) for name, some in groupby(shown, lambda one: one.item.group)],
        absent=[section.item for section in sections if not section.made],
        is_picture=lambda made: isinstance(made, Picture),
        html=html,
        # As an image: parts of several inlined SVGs would share their ids.
        image=lambda picture: base64.b64encode(svg(picture)).decode(),
        versions=", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        package=f"lrkv_jax {__version__}; Python {platform.python_version()}",
    )


def first_table(sections: Sequence[Section]) -> Table | None:
    """The first table of runs, for a terminal, or None."""
    of_runs = (one.made for one in sections if one.item.reads in ("runs", "analyses"))
    tables = (made for every in of_runs for made in every if isinstance(made, Table))
    return next((table for table in tables if table.name != "printed"), None)


def runs_table(runs: Sequence[RunRecord]) -> Table:
    """Which runs a page is of, and how far each has come."""
    columns = [
        Column("run"), Column("variant"), Column("seed"), Column("steps"),
        Column("bits per byte", digits=4), Column("evaluated"), Column("analyzed"),
    ]  # fmt: skip
    rows = []
    for setting in every_setting(runs):
        for run in setting.runs:
            steps = f"{run.steps_done:,} of {run.config.train.total_steps:,}"
            analyzed = f"step {run.analysis['step']:,}" if run.analysis else "no"
            bits = None if run.midtrained else run.bits_per_byte
            rows.append(
                TableRow.of(
                    run.path.name, run.label, run.seed, steps, bits,
                    "yes" if run.evaluation else "no", analyzed, block=setting.name,
                )
            )  # fmt: skip
    return Table("Runs on this page", columns, rows)
