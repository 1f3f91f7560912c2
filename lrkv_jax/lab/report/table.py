"""Tables: cells with spreads, the paper's printed value beside ours, the best ones marked, gaps.

`lrkv_jax.lab.report.written` writes them as Markdown, LaTeX, HTML and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lrkv_jax.lab.report.comparison.contrasts import against, spread
from lrkv_jax.lab.report.printed import Printed


@dataclass(frozen=True)
class Column:
    """A column: its heading with `unit`, how its numbers are written, and which way is better.

    `group` is a heading over this column and its neighbours of the same group.
    """

    name: str
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    digits: int = 3
    group: str = ""

    @property
    def heading(self) -> str:
        arrow = {"lower": " ↓", "higher": " ↑", None: ""}[self.better]
        return f"{self.name}{f', {self.unit}' if self.unit else ''}{arrow}"


@dataclass(frozen=True)
class Cell:
    """What stands in one place.

    `value` is a number or text; `seeds` the numbers by seed that it is the mean of, if it is one;
    `printed` the paper's value for the same setting; `note` becomes a footnote; `gap` says why
    there is no value.
    """

    value: float | int | str | None = None
    seeds: Mapping[int, float] = field(default_factory=dict)
    printed: Printed | None = None
    note: str = ""
    gap: str = ""

    @classmethod
    def over(cls, seeds: Mapping[int, float], **rest: Any) -> Cell:
        """The mean of a value by seed, with its spread; nothing where one of them is None."""
        if None in seeds.values():
            return cls(**rest)
        return cls(spread(list(seeds.values())).mean, dict(seeds), **rest)

    @classmethod
    def of_paper(cls, printed: Printed | None) -> Cell:
        """The paper's own value, to the digit, with what is wrong with it."""
        return cls(printed.text, note=printed.verdict) if printed else cls("")

    @property
    def sd(self) -> float | None:
        return spread(list(self.seeds.values())).sd if self.seeds else None


def no_run(what: str) -> Cell:
    """A labelled gap, as in `no_run("2.5b mla")`."""
    return Cell(gap=f"no run: {what}")


@dataclass(frozen=True)
class Row:
    """Cells in the order of the columns; plain values become cells. `block` is its rows' heading.

    The best values are marked among the rows of one block.
    """

    cells: tuple[Cell, ...]
    block: str = ""

    @classmethod
    def of(cls, *cells: Cell | float | int | str | None, block: str = "") -> Row:
        return cls(tuple(c if isinstance(c, Cell) else Cell(c) for c in cells), block)


@dataclass
class Table:
    """A table; `name` is added to the artefact's in file names where an artefact has several.

    `missing` names what has no row at all.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    caption: str = ""
    name: str = ""
    missing: list[str] = field(default_factory=list)

    @property
    def gaps(self) -> list[str]:
        """What there are no values for, each once."""
        cells = (c.gap for row in self.rows for c in row.cells if c.gap)
        return list(dict.fromkeys([*self.missing, *cells]))

    @property
    def empty(self) -> bool:
        """Whether no row has a value beside its name."""
        return all(cell.value is None for row in self.rows for cell in row.cells[1:])

    def marks(self) -> dict[tuple[int, int], Literal["best", "level"]]:
        """Which cells are marked, by row and column.

        "best" is the best mean of its block and column, "level" a mean that is not significantly
        different from it (seeds as blocks, p adjusted by Holm for the number of rivals).
        Without two seeds there is no such test, and nothing is level.
        """
        found: dict[Any, Any] = {}
        blocks: dict[str, list[int]] = {}
        for place, row in enumerate(self.rows):
            blocks.setdefault(row.block, []).append(place)
        for at, column in enumerate(self.columns):
            if column.better:
                for places in blocks.values():
                    found |= self._marked(at, places)
        return found

    def _marked(self, at: int, places: list[int]) -> dict[tuple[int, int], str]:
        column = self.columns[at]
        cells = {p: self.rows[p].cells[at] for p in places}
        values = {p: c.value for p, c in cells.items() if _is_number(c.value)}
        if len(values) < 2:
            return {}
        best = (min if column.better == "lower" else max)(values, key=values.get)
        # Values that are written with the same digits are equally good.
        alike = [
            p
            for p in values
            if written_number(values[p], column) == written_number(values[best], column)
        ]
        rivals = {str(p): cells[p].seeds for p in values if p not in alike and cells[p].seeds}
        tested = against(cells[best].seeds, rivals) if cells[best].seeds else {}
        level = [int(p) for p, test in tested.items() if test.p is not None and not test.differs]
        return {(p, at): "best" for p in alike} | {(p, at): "level" for p in level}

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON: every number whole, not as it is written."""
        return {
            "title": self.title,
            "caption": self.caption,
            "columns": [vars(column) for column in self.columns],
            "rows": [
                {"block": row.block, "cells": [_cell(cell) for cell in row.cells]}
                for row in self.rows
            ],
            "notes": self.notes,
            "gaps": self.gaps,
        }


def paper_table(
    columns: Sequence[Column], rows: Iterable[tuple[str, str, Sequence[Printed | None]]]
) -> Table:
    """The paper's values as it prints them: rows are (block, name, values)."""
    made = [Row.of(name, *map(Cell.of_paper, values), block=block) for block, name, values in rows]
    return Table("The paper's values, printed", list(columns), made, name="printed")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def written_number(value: Any, column: Column) -> str:
    """A number with its column's digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{column.digits}f}"


def _cell(cell: Cell) -> dict[str, Any]:
    row: dict[str, Any] = {"value": cell.value}
    if cell.seeds:
        row |= {"sd": cell.sd, "seeds": {str(seed): v for seed, v in cell.seeds.items()}}
    if cell.printed:
        row["paper"] = {"printed": cell.printed.text, "verdict": cell.printed.verdict}
    return row | {key: text for key in ("note", "gap") if (text := getattr(cell, key))}
