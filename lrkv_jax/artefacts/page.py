"""One HTML page that needs nothing beside itself: tables, pictures, gaps, versions."""

from __future__ import annotations

import base64
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version

from lrkv_jax import __version__
from lrkv_jax.artefacts.artefact import Artefact, Made
from lrkv_jax.artefacts.figure import Picture, svg
from lrkv_jax.artefacts.table import Table
from lrkv_jax.artefacts.written import html

_PACKAGES = ("jax", "flax", "optax", "numpy", "matplotlib")
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #666; --rule: #ccc;
  --shade: #f4f4f2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e0; --paper: #17181a; --soft: #a0a0a0; --rule: #444; --shade: #222427 }
}
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2 } h2 { font-size: 1.2rem; margin: 2.5rem 0 .3rem }
a { color: inherit } nav ol { columns: 18rem; padding-left: 1.5rem } nav .gap { color: var(--soft) }
.where, .notes, footer { color: var(--soft); font-size: .85rem } .notes p { margin: .2rem 0 }
figure { margin: 1rem 0 2rem } figcaption { margin-bottom: .4rem }
.wide { overflow-x: auto } img { max-width: 100%; height: auto; background: #fff }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums;
  border-top: 2px solid; border-bottom: 2px solid }
td, th { padding: .2rem .6rem; text-align: right; font-weight: normal }
thead th { font-weight: 600; border-bottom: 1px solid; vertical-align: bottom }
tbody th:first-child, thead th:first-child { text-align: left }
td, tbody th { white-space: nowrap } td.words { white-space: normal; min-width: 12rem }
thead th[colspan] { text-align: center }
sup { line-height: 0 }
tr.block th { text-align: left; font-style: italic; background: var(--shade) }
p.gap { border: 1px dashed var(--rule); padding: .5rem .8rem; margin: .5rem 0;
  color: var(--soft) }
@media print { nav { break-after: page } figure, tr { break-inside: avoid }
  body { max-width: none; font-size: 10pt } .wide { overflow: visible } }
"""


@dataclass(frozen=True)
class Section:
    """A heading, where it stands in the paper, and what is under it: tables, pictures, words."""

    name: str
    title: str
    where: str = ""
    made: Sequence[Made] = ()
    words: str = ""

    @classmethod
    def of(cls, artefact: Artefact, made: Sequence[Made]) -> Section:
        return cls(artefact.name, artefact.title, artefact.paper, made)

    @property
    def gaps(self) -> list[str]:
        return list(dict.fromkeys(gap for one in self.made for gap in one.gaps))


def page(title: str, sections: Sequence[Section], *, about: str = "") -> str:
    """The page as HTML: pictures inlined as SVG, no link that leaves it, readable when printed."""
    contents = "".join(
        f'<li{" class=gap" if one.gaps else ""}><a href="#{escape(one.name, quote=True)}">'
        f"{escape(_named(one))}</a></li>"
        for one in sections
    )
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        + (f"<p>{escape(about)}</p>" if about else "")
        + f"<nav><ol>{contents}</ol></nav>"
        + "".join(map(_section, sections))
        + f"<footer><p>lrkv_jax {__version__}; Python {platform.python_version()}, "
        f"{escape(versions)}.</p></footer></body></html>\n"
    )


def _named(section: Section) -> str:
    return f"{section.where}: {section.title}" if section.where else section.title


def _section(section: Section) -> str:
    # A table's own notes have its gaps.
    pictures = [one for one in section.made if isinstance(one, Picture)]
    gaps = "; ".join(dict.fromkeys(gap for one in pictures for gap in one.gaps))
    return (
        f'<section id="{escape(section.name, quote=True)}"><h2>{escape(_named(section))}</h2>'
        f'<p class="where">{escape(section.name)}</p>'
        + (f"<p>{escape(section.words)}</p>" if section.words else "")
        + "".join(map(_one, section.made))
        + (f'<p class="gap">{escape(gaps)}</p>' if gaps else "")
        + "</section>"
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
