"""Tables: cells with spreads, the paper's value next to ours, and the best of each block.

`lrkv_jax.lab.report.renderers` writes them as Markdown, HTML and text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lrkv_jax.lab.report.comparison.contrasts import mean_and_sd
from lrkv_jax.lab.report.paper_values import SCALES, PaperValue, paper_table, paper_value


@dataclass(frozen=True)
class Column:
    """A column: its heading with `unit`, how its numbers are written, and which way is better.

    `group` is a heading over this column and its neighbors of the same group.
    """

    name: str
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    digits: int = 3
    group: str = ""

    @property
    def heading(self) -> str:
        arrow = {"lower": " ↓", "higher": " ↑", None: ""}[self.better]
        unit = f", {self.unit}" if self.unit else ""
        return f"{self.group} {self.name}{unit}{arrow}".strip()

    def format(self, value: Any) -> str:
        """A number with the column's digits; text as it is, and a dash for nothing."""
        if value is None:
            return "—"
        if isinstance(value, str):
            return value
        return f"{value:,}" if isinstance(value, int) else f"{value:,.{self.digits}f}"


@dataclass(frozen=True)
class Cell:
    """A table's cell.

    `value` is a number or text; `seeds` the numbers by seed that it is the mean of, if it is one;
    `paper` the paper's value for the same setting; `note` becomes a footnote.
    """

    value: float | int | str | None = None
    seeds: Mapping[int, float] = field(default_factory=dict)
    paper: PaperValue | None = None
    note: str = ""

    @classmethod
    def over(cls, seeds: Mapping[int, float | None], **rest: Any) -> Cell:
        """The mean of a value by seed, with its spread; empty where one of them is None."""
        if not seeds or None in seeds.values():
            return cls(**rest)
        return cls(mean_and_sd(seeds.values())[0], dict(seeds), **rest)

    @property
    def sd(self) -> float | None:
        return mean_and_sd(self.seeds.values())[1] if self.seeds else None


@dataclass(frozen=True)
class TableRow:
    """Cells in the order of the columns; rows of one `block` have it as their heading."""

    cells: tuple[Cell, ...]
    block: str = ""

    @classmethod
    def of(cls, *cells: Cell | float | int | str | None, block: str = "") -> TableRow:
        """A row of cells, of which plain values become some."""
        return cls(tuple(c if isinstance(c, Cell) else Cell(c) for c in cells), block)


@dataclass
class Table:
    """A table; `name` is added to the item's in file names where an item has several."""

    title: str
    columns: list[Column]
    rows: list[TableRow]
    notes: list[str] = field(default_factory=list)
    caption: str = ""
    name: str = ""

    def with_data(self, *without: str) -> Table:
        """The table without columns of these names, and those that hold nothing in any row."""
        kept = [
            at for at, column in enumerate(self.columns)
            if column.name not in without
            and any(row.cells[at].value not in (None, "") for row in self.rows)
        ]  # fmt: skip
        rows = [TableRow(tuple(row.cells[at] for at in kept), row.block) for row in self.rows]
        return replace(self, columns=[self.columns[at] for at in kept], rows=rows)

    def best(self) -> set[tuple[int, int]]:
        """Places (row, column) of each block's best values, and of those written the same."""
        found: set[tuple[int, int]] = set()
        for at, column in enumerate(self.columns):
            for block in dict.fromkeys(row.block for row in self.rows if column.better):
                found |= self._best_of(at, block)
        return found

    def _best_of(self, at: int, block: str) -> set[tuple[int, int]]:
        column = self.columns[at]
        values = {
            place: row.cells[at].value
            for place, row in enumerate(self.rows)
            if row.block == block and _is_number(row.cells[at].value)
        }
        if len(values) < 2:
            return set()
        best = column.format((min if column.better == "lower" else max)(values.values()))
        return {(place, at) for place, value in values.items() if column.format(value) == best}

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON, with every digit of its numbers."""
        return {
            "title": self.title,
            "caption": self.caption,
            "columns": [vars(column) for column in self.columns],
            "rows": [
                {"block": row.block, "cells": [_as_dict(cell) for cell in row.cells]}
                for row in self.rows
            ],
            "notes": self.notes,
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _as_dict(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = {"value": cell.value}
    if cell.seeds:
        found |= {"sd": cell.sd, "seeds": {str(seed): v for seed, v in cell.seeds.items()}}
    if cell.paper:
        found["paper"] = {"printed": cell.paper.text, "verdict": cell.paper.verdict}
    return found | ({"note": cell.note} if cell.note else {})


def table_of_paper(name: str, columns: Mapping[str, Column]) -> Table:
    """The paper's table of this name as it is printed, each value with its error, if any.

    `columns` are those to show, by their keys in `paper_values.yaml`.
    """
    rows = []
    for scale, variants in paper_table(name).items():
        for variant in variants:
            values = [paper_value(name, scale, variant, key) for key in columns]
            cells = [Cell(one.text, note=one.verdict) if one else Cell("") for one in values]
            block = f"{SCALES[scale]}: paper, printed"
            kind, _, size = variant.partition("_")  # mha, or lrkv_64 of an ablation
            label = kind.upper() + (f"-{size}" if size else "")
            rows.append(TableRow.of(label, *cells, block=block))
    return Table(
        "The paper's values, printed",
        [Column("variant"), *columns.values()],
        rows,
        name="printed",
    )
