"""What one table or figure is, and the registry that every one of them joins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lrkv_jax.lab.report.figure import Picture, style, write_picture
from lrkv_jax.lab.report.table import Table
from lrkv_jax.lab.report.written import write_table

Made = Table | Picture
Reads = Literal["configurations", "runs", "analyses", "benches", "runs and benches"]
GROUPS = ("Tables", "Figures", "Beside the paper's tables and figures")
_REGISTRY: dict[str, Artefact] = {}


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper, or one beside it.

    `name` is that of its files; `paper` says where it stands there, as in "Figure 2". `make` turns
    what it `reads` into one or several tables and pictures: runs (of any number), analysed runs,
    reports of decode benchmarks, or both in this order. One that reads configurations alone is
    given the runs too, and needs none.
    """

    name: str
    title: str
    paper: str
    reads: Reads
    make: Callable[..., Made | Iterable[Made]]

    def made(self, runs: Sequence[Any], benches: Sequence[dict[str, Any]] = ()) -> list[Made]:
        """Its tables and pictures, also the empty ones that only say what is missing."""
        with style():
            reads = {"benches": [benches], "runs and benches": [runs, benches]}
            result = self.make(*reads.get(self.reads, [runs]))
            return [result] if isinstance(result, Table | Picture) else list(result)

    def write(self, made: Sequence[Made], out: Path) -> list[Path]:
        """Write what is not empty into a folder: tables as Markdown, LaTeX, JSON; PNG and SVG."""
        paths = []
        for one in made:
            if not one.empty:
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


def artefact(paper: str, title: str, *, reads: Reads = "runs") -> Callable[..., Artefact]:
    """Register the decorated function as an artefact under its own name."""

    def register(make: Callable[..., Made | Iterable[Made]]) -> Artefact:
        name = make.__name__
        if name in _REGISTRY:
            raise ValueError(f"two artefacts are named {name}")
        _REGISTRY[name] = Artefact(name, title, paper, reads, make)
        return _REGISTRY[name]

    return register


def registered() -> tuple[Artefact, ...]:
    """All that joined: tables by their numbers, figures by theirs, then those without one."""
    return tuple(sorted(_REGISTRY.values(), key=lambda one: one._order))
