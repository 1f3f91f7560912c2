"""A table as Markdown, HTML and text: one function, through tabulate."""

import html as _html
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lrkv_jax.lab.report.tables import Cell, Column, Table
from lrkv_jax.lab.report.tabulated import tabulated

BOLD = "Bold: the best of its block, whether or not it differs significantly."
_WORDS = 30  # characters; a longer cell is text, whose lines are broken


@dataclass(frozen=True)
class _Format:
    """A format's rules for text, the best value, a block's heading and footnotes."""

    name: str  # tabulate's
    escape: Callable[[str], str]
    best: str = "{}"
    block: str = "{}"
    footnote: str = ""
    words: str = "{}"


def _cells(table: Table, form: _Format) -> tuple[list[str], list[list[str]], list[str]]:
    """The headings, the rows with their blocks' headings, and the notes below the table."""
    best, rows = table.best(), []
    footnotes: list[str] = []
    for block, numbered in groupby(enumerate(table.rows), key=lambda each: each[1].block):
        if block:
            heading = form.block.format(form.escape(block))
            rows.append([heading] + [""] * (len(table.columns) - 1))
        for y, row in numbered:
            cells = zip(row.cells, table.columns, strict=True)
            rows.append([
                _text(cell, column, form, footnotes, best=(y, x) in best)
                for x, (cell, column) in enumerate(cells)
            ])  # fmt: skip
    headings = [form.escape(column.heading) for column in table.columns]
    notes = [f"[{n}] {text}" for n, text in enumerate(footnotes, 1)] + table.notes
    return headings, rows, notes + [BOLD] * bool(best)


def _text(cell: Cell, column: Column, form: _Format, footnotes: list[str], *, best: bool) -> str:
    """One cell's text; its footnotes join those of the table."""
    text = column.format(cell.value)
    if cell.sd is not None:
        sd = f"{cell.sd:.{column.digits}f}"
        text += f" ± {sd if float(sd) or not cell.sd else f'{cell.sd:.1g}'}"
    if cell.paper:
        text += f" (paper {cell.paper.text})"
    shown = form.escape(text)
    if best:
        shown = form.best.format(shown)
    if len(text) > _WORDS:
        shown = form.words.format(shown)
    notes = [note for note in (cell.note, cell.paper and cell.paper.verdict) if note]
    footnotes += [note for note in notes if note not in footnotes]
    numbers = ", ".join(str(footnotes.index(note) + 1) for note in notes)
    return shown + (form.footnote.format(numbers) if numbers else "")


def write_table(table: Table, out: Path, name: str) -> None:
    """Write NAME.md and NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(markdown(table), encoding="utf-8")
    text = json.dumps(table.as_dict(), indent=1, ensure_ascii=False) + "\n"
    (out / f"{name}.json").write_text(text, encoding="utf-8")


def terminal(table: Table) -> str:
    """The table as wide as the terminal, without footnotes and notes; * marks the best.

    Many columns of few rows are written below one another.
    """
    headings, rows, _ = _cells(table, _Format("", str, best="*{}"))
    if len(headings) > 8 > len(rows) and not any(row.block for row in table.rows):
        headings, *rows = map(list, zip(headings, *rows, strict=True))
    widest = max(5, shutil.get_terminal_size().columns // len(headings) - 2)
    body = tabulated(headings, rows, form="simple", widest=widest)
    return "\n\n".join(filter(None, (table.title, body, table.caption)))


def markdown(table: Table) -> str:
    """The table under a heading, with its notes below."""
    form = _Format("pipe", lambda text: text.replace("|", "\\|"), "**{}**", "*{}*", " [{}]")
    headings, rows, notes = _cells(table, form)
    body = tabulated(headings, rows, form=form.name)
    parts = [f"## {table.title}", table.caption, body, *notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def html(table: Table) -> str:
    """A `figure` with a `table` in it, its text escaped."""
    text = _html.escape
    form = _Format(
        "unsafehtml", text, "<b>{}</b>", "<i>{}</i>", "<sup>{}</sup>",
        '<span class="words">{}</span>',
    )  # fmt: skip
    headings, rows, notes = _cells(table, form)
    body = tabulated(headings, rows, form=form.name)
    if not any(column.heading for column in table.columns):
        body = body.partition("<thead>")[0] + body.partition("</thead>")[2]
    caption = f"<b>{text(table.title)}</b>" + f". {text(table.caption)}" * bool(table.caption)
    beneath = "".join(f"<p>{text(note)}</p>" for note in notes)
    return (
        f'<figure class="table"><figcaption>{caption}</figcaption><div class="wide">{body}</div>'
        f'<div class="notes">{beneath}</div></figure>'
    )
