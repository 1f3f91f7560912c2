"""One HTML page that needs no other file: a summary, tables, pictures, and what is missing."""

import base64
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lrkv_jax import __version__
from lrkv_jax.lab.report.artefact import Artefact, Made
from lrkv_jax.lab.report.comparison import RunRecord, every_setting
from lrkv_jax.lab.report.figure import svg
from lrkv_jax.lab.report.table import Column, Row, Table
from lrkv_jax.lab.report.written import html

_PACKAGES = ("jax", "flax", "optax", "numpy", "scipy", "matplotlib")
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #5f5f5f; --rule: #ccc }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e0; --paper: #17181a; --soft: #a8a8a8; --rule: #444 }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.5rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .3rem }
a { color: inherit }
nav { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 0 2rem;
  border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule); font-size: .9rem }
nav h2 { font-size: .95rem; margin: .6rem 0 .2rem } nav ul { margin: 0 0 .6rem; padding: 0 }
nav li { list-style: none; margin: .1rem 0 }
.files, .notes, footer, summary { color: var(--soft); font-size: .85rem }
.notes p, .files { margin: .2rem 0 }
details { margin: .5rem 0 } summary { cursor: pointer }
details li, dl { font-size: .88rem; color: var(--soft) } dt { color: var(--ink) }
figure { margin: .6rem 0 1.6rem } figcaption { margin-bottom: .4rem }
.wide { overflow-x: auto } img { max-width: 100%; height: auto; background: #fff }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums;
  border-top: 2px solid; border-bottom: 2px solid }
td, th { padding: .2rem .6rem; text-align: left }
th { font-weight: 600; border-bottom: 1px solid; vertical-align: bottom }
td { white-space: nowrap }
.words { display: inline-block; white-space: normal; min-width: 12rem }
sup { line-height: 0 }
@media print { nav { break-after: page } figure, tr { break-inside: avoid }
  body { max-width: none; font-size: 10pt } .wide { overflow: visible } }
"""


@dataclass(frozen=True)
class Section:
    """An artefact and what was made of it."""

    artefact: Artefact
    made: Sequence[Made]

    @property
    def named(self) -> str:
        return f"{self.artefact.paper}: {self.artefact.title}"

    @property
    def shown(self) -> list[Made]:
        return [one for one in self.made if not one.empty]

    @property
    def gaps(self) -> list[str]:
        return list(dict.fromkeys(gap for one in self.made for gap in one.gaps))


def write_page(
    path: Path,
    title: str,
    artefacts: Sequence[Artefact],
    runs: Sequence[RunRecord],
    headline: Table,
    *,
    broken: Mapping[Path, str] = MappingProxyType({}),
    benches: Sequence[dict[str, Any]] = (),
    progress: Callable[[str, float, int], None] = lambda name, done, total: None,
) -> list[Section]:
    """Make artefacts of runs and decode benchmarks: their files, and the page, beside one another.

    `headline` stands first, without a section of its own. `broken` are {directory: reason} of runs
    that were left out. `progress` is called with a description,
    the number done and the number of all.
    """
    sections = []
    for done, artefact in enumerate(artefacts):
        progress("tables and figures", done, len(artefacts))
        made = artefact.made(runs, benches)
        artefact.write(made, path.parent)
        sections.append(Section(artefact, made))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, sections, runs, headline, broken), encoding="utf-8")
    progress("tables and figures", len(artefacts), len(artefacts))
    return sections


def page(
    title: str,
    sections: Sequence[Section],
    runs: Sequence[RunRecord],
    headline: Table,
    broken: Mapping[Path, str] = MappingProxyType({}),
) -> str:
    """The page as HTML: pictures inlined as SVG, no link that leaves it, readable when printed."""
    shown = [one for one in sections if one.shown]
    absent = [one for one in sections if not one.shown]
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        + _summary(runs, headline)
        + _left_out(broken)
        + _contents(shown, len(absent))
        + "".join(map(_section, shown))
        + _absent(absent)
        + f"<footer><p>lrkv_jax {__version__}; Python {platform.python_version()}, "
        f"{escape(versions)}.</p></footer></body></html>\n"
    )


def runs_table(runs: Sequence[RunRecord]) -> Table:
    """Which runs a page is of, and how far each has come."""
    columns = [
        Column("run"), Column("variant"), Column("seed"), Column("steps"),
        Column("bits per byte", digits=4), Column("evaluated"), Column("analysed"),
    ]  # fmt: skip
    rows = []
    for setting in every_setting(runs):
        for run in setting.runs:
            steps = f"{run.steps_done:,} of {run.config.train.total_steps:,}"
            analysed = f"step {run.analysis['step']:,}" if run.analysis else "no"
            bits = None if run.midtrained else run.bits_per_byte
            rows.append(
                Row.of(
                    run.path.name, run.label, run.seed, steps, bits,
                    "yes" if run.evaluation else "no", analysed, block=setting.name,
                )
            )  # fmt: skip
    return Table("Runs on this page", columns, rows)


def _summary(runs: Sequence[RunRecord], headline: Table) -> str:
    if not runs:
        return "<p>No runs were given: here is what needs none, and the paper's own values.</p>"
    table = runs_table(runs)
    scales = ", ".join(dict.fromkeys(row.block for row in table.rows))
    seeds = len({run.seed for run in runs})
    words = f"{_counted(len(runs), 'run')} with {_counted(seeds, 'seed')}: {scales}"
    return (
        "" if headline.empty else html(headline)
    ) + f"<details><summary>{escape(words)}</summary>{html(table)}</details>"


def _left_out(broken: Mapping[Path, str]) -> str:
    """The runs whose files are damaged, by name and reason; "" without one."""
    items = "".join(
        f"<dt>{escape(str(folder))}</dt><dd>{escape(reason)}</dd>"
        for folder, reason in broken.items()
    )
    words = f"{_counted(len(broken), 'run')} left out"
    return f"<details open><summary>{words}</summary><dl>{items}</dl></details>" if items else ""


def _contents(shown: Sequence[Section], absent: int) -> str:
    lists = []
    for heading, some in groupby(shown, key=lambda one: one.artefact.group):
        items = "".join(
            f'<li><a href="#{escape(one.artefact.name, quote=True)}">{escape(one.named)}</a></li>'
            for one in some
        )
        lists.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    if absent:
        words = f"{_counted(absent, 'table or figure', 'tables and figures')} without data"
        last = f'<h2>Missing</h2><ul><li><a href="#missing">{words}</a></li></ul>'
        lists = [*lists[:-1], "".join([*lists[-1:], last])]
    return f"<nav>{''.join(f'<div>{one}</div>' for one in lists)}</nav>"


def _section(section: Section) -> str:
    name = section.artefact.name
    gaps = "".join(f"<li>{escape(gap)}</li>" for gap in section.gaps)
    count = _counted(len(section.gaps), "gap")
    return (
        f'<section id="{escape(name, quote=True)}"><h2>{escape(section.named)}</h2>'
        + "".join(map(_one, section.shown))
        + (f"<details><summary>{count}</summary><ul>{gaps}</ul></details>" if gaps else "")
        + f'<p class="files">Files: {escape(name)}*</p></section>'
    )


def _absent(sections: Sequence[Section]) -> str:
    if not sections:
        return ""
    items = "".join(
        f"<dt>{escape(one.named)}</dt><dd>{escape('; '.join(one.gaps))}</dd>" for one in sections
    )
    words = _counted(len(sections), "table or figure", "tables and figures")
    return (
        f'<section id="missing"><h2>Missing</h2><details><summary>{words} without data, and what '
        f"each needs</summary><dl>{items}</dl></details></section>"
    )


def _one(made: Made) -> str:
    if isinstance(made, Table):
        return html(made)
    # As an image: parts of several inlined SVGs would share their ids.
    data = base64.b64encode(svg(made)).decode()
    caption = f"{made.title}. {made.caption}".strip()
    return (
        f'<figure><div class="wide"><img src="data:image/svg+xml;base64,{data}" '
        f'alt="{escape(made.title, quote=True)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _counted(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"
