"""What one table or figure of the report is, the registry that each joins, and their page.

The page is one HTML file: runs, tables, pictures, and what is missing.
"""

from __future__ import annotations

import base64
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lrkv_jax import __version__
from lrkv_jax.lab.report.comparison import RunRecord, every_setting
from lrkv_jax.lab.report.figures import Picture, style, svg, write_picture
from lrkv_jax.lab.report.renderers import html, write_table
from lrkv_jax.lab.report.tables import Column, Table, TableRow

_PACKAGES = ("jax", "flax", "optax", "numpy", "scipy", "matplotlib")
Made = Table | Picture
Reads = Literal["configurations", "runs", "analyses", "runs and benches"]
NEEDS = {
    "configurations": "nothing",
    "runs": "finished runs: lrkv report RUN",
    "analyses": "analyzed runs: lrkv analyze RUN",
    "runs and benches": "finished runs of these variants, with MHA: lrkv report RUN --bench FILE",
}
GROUPS = ("Tables", "Figures", "Beside the paper's tables and figures")
_REGISTRY: dict[str, ReportItem] = {}


@dataclass(frozen=True)
class ReportItem:
    """A table or figure of the paper, or one beside it.

    `name` is that of its files; `paper` says where it stands there, as in "Figure 2". `make` turns
    what it `reads` into tables and pictures, or none: runs, analyzed runs, or runs and reports of
    decode benchmarks. One that reads configurations alone is given the runs too. `needs` says what
    it takes to make any.
    """

    name: str
    title: str
    paper: str
    reads: Reads
    needs: str
    make: Callable[..., Made | Iterable[Made]]

    def made(self, runs: Sequence[Any], benches: Sequence[dict[str, Any]] = ()) -> list[Made]:
        """Its tables and pictures of these runs and benchmarks."""
        with style():
            more = [benches] if self.reads == "runs and benches" else []
            result = self.make(runs, *more)
            return [result] if isinstance(result, Table | Picture) else list(result)

    def write(self, made: Sequence[Made], out: Path) -> list[Path]:
        """Write them into a folder: tables as Markdown and JSON, pictures as PNG and SVG."""
        paths = []
        for one in made:
            name = f"{self.name}_{one.name}" if one.name else self.name
            if isinstance(one, Table):
                paths += write_table(one, out, name)
            else:
                paths += write_picture(one, out, name)
        return paths

    @property
    def group(self) -> str:
        """The heading of the page's contents that it stands under."""
        return next((name for name in GROUPS if name.startswith(self.paper[:5])), GROUPS[-1])

    @property
    def _order(self) -> tuple:
        number = re.search(r"\d+", self.paper)
        return GROUPS.index(self.group), int(number[0]) if number else 0, self.paper, self.name


def report_item(
    paper: str, title: str, *, reads: Reads = "runs", needs: str = ""
) -> Callable[..., ReportItem]:
    """Register the decorated function as an item of the report, under the function's name."""

    def register(make: Callable[..., Made | Iterable[Made]]) -> ReportItem:
        name = make.__name__
        if name in _REGISTRY:
            raise ValueError(f"two items of the report are named {name}")
        _REGISTRY[name] = ReportItem(name, title, paper, reads, needs or NEEDS[reads], make)
        return _REGISTRY[name]

    return register


def registered() -> tuple[ReportItem, ...]:
    """All that joined: tables by their numbers, figures by theirs, then those without one."""
    return tuple(sorted(_REGISTRY.values(), key=lambda one: one._order))


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
