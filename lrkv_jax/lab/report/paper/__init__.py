"""The paper's tables and figures, and some more: a file for each subject.

Each function registers what it makes (`report_item`); `REPORT_ITEMS` are all of them in the order
of a page. `lrkv report RUN... --paper` makes them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

from lrkv_jax.lab.report.figures import Picture, style, write_picture
from lrkv_jax.lab.report.renderers import write_table
from lrkv_jax.lab.report.tables import Table

Made = Table | Picture
Reads = Literal["configurations", "runs", "analyses"]
GROUPS = ("Tables", "Figures", "Beside the paper's tables and figures")
_REGISTRY: dict[str, "ReportItem"] = {}


@dataclass(frozen=True)
class ReportItem:
    """A table or figure of the paper, or an additional one.

    `name` is that of its files; `paper` is its number there, as in "Figure 2". `make` turns
    what it `reads` into tables and pictures, or none: runs or analyzed runs. One that reads
    configurations alone is given the runs too.
    """

    name: str
    title: str
    paper: str
    reads: Reads
    make: Callable[..., Made | Iterable[Made]]

    def made(self, runs: Sequence[Any]) -> list[Made]:
        """The item's tables and pictures of these runs."""
        with style():
            result = self.make(runs)
            return [result] if isinstance(result, Table | Picture) else list(result)

    def write(self, made: Sequence[Made], out: Path) -> None:
        """Write them into a folder: tables as Markdown and JSON, pictures as PNG and SVG."""
        for one in made:
            name = f"{self.name}_{one.name}" if one.name else self.name
            if isinstance(one, Table):
                write_table(one, out, name)
            else:
                write_picture(one, out, name)

    @property
    def group(self) -> str:
        """The item's heading in the page's contents."""
        return next((name for name in GROUPS if name.startswith(self.paper[:5])), GROUPS[-1])

    @property
    def _order(self) -> tuple:
        number = re.search(r"\d+", self.paper)
        return GROUPS.index(self.group), int(number[0]) if number else 0, self.paper, self.name


def report_item(paper: str, title: str, *, reads: Reads = "runs") -> Callable[..., ReportItem]:
    """Register the decorated function as an item of the report, under the function's name."""

    def register(make: Callable[..., Made | Iterable[Made]]) -> ReportItem:
        name = make.__name__
        if name in _REGISTRY:
            raise ValueError(f"two items of the report are named {name}")
        _REGISTRY[name] = ReportItem(name, title, paper, reads, make)
        return _REGISTRY[name]

    return register


for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)

# Tables by their numbers, figures by theirs, then those without one.
REPORT_ITEMS = tuple(sorted(_REGISTRY.values(), key=lambda one: one._order))
