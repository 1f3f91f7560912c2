"""Pages of runs: one HTML file each, which needs no other file and no network.

`lrkv train` ends with the page of its run; `lrkv report` writes one of several: their results
compared, then each in the same form, then the paper's tables and figures if requested.
"""

from __future__ import annotations

import base64
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lrkv_jax import __version__, files
from lrkv_jax.evaluation.evaluate import BENCHMARKS
from lrkv_jax.evaluation.show import measures
from lrkv_jax.lab import overview
from lrkv_jax.lab.report.comparison.runs import RunRecord, Setting, every_setting
from lrkv_jax.lab.report.figures import Picture, svg
from lrkv_jax.lab.report.paper import ReportItem
from lrkv_jax.lab.report.paper.pretraining import COLUMNS, NOTE, loss_rows
from lrkv_jax.lab.report.renderers import html
from lrkv_jax.lab.report.tables import Column, Table, TableRow

_PACKAGES = ("jax", "flax", "optax", "numpy", "matplotlib")


@dataclass(frozen=True)
class Listing:
    """Text as it is: a sample, or commands."""

    title: str
    text: str


Part = Table | Picture | Listing


@dataclass(frozen=True)
class Section:
    """A section of a page, below one heading; `name` is its anchor."""

    name: str
    title: str
    parts: Sequence[Part]
    group: str = ""  # its heading in the contents


def write_page(
    path: Path,
    runs: Sequence[RunRecord],
    items: Sequence[ReportItem] = (),
    *,
    broken: Mapping[Path, str] = MappingProxyType({}),
    progress: Callable[[str, float, int], None] = lambda name, done, total: None,
) -> list[Section]:
    """Write a page of runs, and next to it the files of the `items` that have something to show.

    The page of one run alone is that run's parts, and its title names it. `broken` are
    {directory: reason} of runs that were left out. `progress` is called with a description, the
    number done and the number of all. Returns the page's sections.
    """
    sections, total = [], len(runs) + len(items)
    alone = len(runs) == total == 1 and runs[0].path.is_dir()
    title = "Report of runs" if runs else "Tables and figures"
    if alone:
        title = _title(runs[0])
    elif runs:
        parts = [
            *_pairs("Runs", overview.as_cells(list(map(overview.row_of, runs))), *overview.HEADERS),
            *(part for one in every_setting(runs) for part in compared(one)),
        ]
        sections.append(Section("runs", "Overview", parts, "Runs"))
    for done, run in enumerate(runs):
        progress("report", done, total)
        if run.path.is_dir():
            heading = "" if alone else _title(run)
            sections.append(Section(f"run-{done}", heading, run_parts(run), "Runs"))
    for done, item in enumerate(items, len(runs)):
        progress("report", done, total)
        if made := item.made(runs):
            item.write(made, path.parent)
            sections.append(Section(item.name, f"{item.paper}: {item.title}", made, item.group))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, page(title, sections, broken))
    progress("report", total, total)
    return sections


def page(
    title: str, sections: Sequence[Section], broken: Mapping[Path, str] = MappingProxyType({})
) -> str:
    """The page as HTML: pictures inlined as SVG, no link that leaves it, readable when printed."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").render(
        title=title,
        sections=sections,
        groups=[(name, list(some)) for name, some in groupby(sections, lambda one: one.group)],
        broken=broken,
        kind=lambda part: type(part).__name__,
        html=html,
        # As an image: parts of several inlined SVGs would share their ids.
        image=lambda picture: base64.b64encode(svg(picture)).decode(),
        versions=", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        package=f"lrkv_jax {__version__}; Python {platform.python_version()}",
    )


def run_parts(run: RunRecord) -> list[Part]:
    """A run's description, curves, samples, evaluation, machine and cost, and what to do next."""
    where, changed = overview.changed_settings(run.config)
    evaluation = run.evaluation or {}
    scores = [
        (name + ", demonstration set" * one["dataset"]["demonstration"], f"{one['score']:.1%}")
        for name in BENCHMARKS
        if (one := evaluation.get(name))
    ]
    return [
        *_pairs("Run", overview.about(run)),
        *_pictures(overview.run_curves(run)),
        *(Listing(f"Sample, {step}", text) for step, text in overview.samples(run).items()),
        *_pairs("Evaluation", measures(evaluation) if evaluation else []),
        *_pairs("Benchmarks", scores),
        *_pairs("Settings", changed, "setting", "value", where),
        *_pairs("Machine and cost", overview.cost(run)),
        Listing("Next", "\n".join(overview.next_commands(run))),
    ]


def _pairs(title: str, rows: Iterable[Sequence[str]], *names: str) -> list[Table]:
    """A table of texts, or none without rows."""
    made = [TableRow.of(*row) for row in rows]
    columns = [Column(name) for name in names or ("", "")]
    return [Table(title, columns, made).with_data()] if made else []


def _pictures(shown: Iterable[overview.Panel]) -> list[Picture]:
    """A picture of each panel that has data."""
    return [picture for panel in shown if (picture := overview.drawn(panel[0], [panel]))]


def _title(run: RunRecord) -> str:
    step = f"step {run.steps_done:,} of {run.config.train.total_steps:,}"
    return f"{run.path.name}: {run.label}, {overview.state_of(run)} at {step}"


def compared(setting: Setting) -> Iterable[Part]:
    """The finished variants of a setting, compared, and the curves of all its runs."""
    variants = {label: setting.seeds(label) for label in setting.labels}
    if len(rows := loss_rows("", variants)) > 1:
        yield Table(f"Comparison, {setting.name}", COLUMNS, rows, [NOTE]).with_data()
    if len(setting.runs) > 1:
        yield from _pictures(overview.curves(setting.runs))
