"""A table as Markdown, LaTeX and HTML, and on a terminal: one function, through tabulate."""

import html as _html
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lrkv_jax.lab.report.table import Cell, Column, Table, written_number
from lrkv_jax.lab.report.tabulated import tabulated

MARKS = (
    "Bold: the best mean of its block; ≈: not significantly different from the best (seeds as "
    "blocks, p adjusted by Holm, p ≥ 0.05)."
)
ONE_SEED = "Bold: the best value of its block; with one seed no difference can be told from noise."
_NONE = "—"
_WORDS = 30  # characters; a longer cell is text, whose lines are broken


@dataclass(frozen=True)
class _Form:
    """What a format does with text, with the best value, a block's heading and footnotes."""

    name: str  # tabulate's
    escape: Callable[[str], str]
    best: str = "{}"
    block: str = "{}"
    footnote: str = ""
    words: str = "{}"


def _cells(table: Table, form: _Form) -> tuple[list[list[str]], list[str]]:
    """The rows as texts, a row for the heading of each block, and the notes beneath the table."""
    marks, rows = table.marks(), []
    footnotes: list[str] = []
    for block, numbered in groupby(enumerate(table.rows), key=lambda each: each[1].block):
        if block:
            heading = form.block.format(form.escape(block))
            rows.append([heading] + [""] * (len(table.columns) - 1))
        for y, row in numbered:
            pairs = enumerate(zip(row.cells, table.columns, strict=True))
            rows.append(
                [_cell(cell, column, marks.get((y, x)), form, footnotes)
                 for x, (cell, column) in pairs]
            )  # fmt: skip
    notes = [f"[{n}] {text}" for n, text in enumerate(footnotes, 1)] + table.notes
    if marks:
        seeds = max(len(row.cells[x].seeds) for row in table.rows for _, x in marks)
        notes.append(MARKS if seeds > 1 else ONE_SEED)
    return rows, notes


def _cell(cell: Cell, column: Column, mark: str | None, form: _Form, footnotes: list[str]) -> str:
    """One cell's text; its footnotes join those of the table."""
    text = _NONE if cell.value is None else str(cell.value)
    if isinstance(cell.value, int | float) and not isinstance(cell.value, bool):
        text = written_number(cell.value, column)
    if cell.sd is not None:
        sd = f"{cell.sd:.{column.digits}f}"
        text += f" ± {sd if float(sd) or not cell.sd else f'{cell.sd:.1g}'}"
    if mark == "level":
        text += " ≈"
    if cell.printed:
        text += f" (paper {cell.printed.text})"
    shown = form.escape(text)
    if mark == "best":
        shown = form.best.format(shown)
    if len(text) > _WORDS:
        shown = form.words.format(shown)
    notes = [note for note in (cell.note, cell.printed and cell.printed.verdict) if note]
    footnotes += [note for note in notes if note not in footnotes]
    numbers = ", ".join(str(footnotes.index(note) + 1) for note in notes)
    if numbers:
        shown += form.footnote.format(numbers)
    return shown


def _body(table: Table, form: _Form, *, widest: int | None = None) -> tuple[str, list[str]]:
    """The table in a format of tabulate, and its notes."""
    rows, notes = _cells(table, form)
    headings = [form.escape(f"{column.group} {column.heading}".strip()) for column in table.columns]
    return tabulated(headings, rows, form=form.name, widest=widest), notes


def _gaps(table: Table) -> list[str]:
    return ["Gaps: " + "; ".join(table.gaps) + "."] if table.gaps else []


def write_table(table: Table, out: Path, name: str) -> list[Path]:
    """Write NAME.md, NAME.tex and NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        ".md": markdown(table),
        ".tex": latex(table, label=name),
        ".json": json.dumps(table.as_dict(), indent=1, ensure_ascii=False) + "\n",
    }
    paths = []
    for ending, text in texts.items():
        paths.append(out / f"{name}{ending}")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def terminal(table: Table) -> str:
    """The table as wide as the terminal, without footnotes, notes, gaps; * marks the best."""
    widest = shutil.get_terminal_size().columns // len(table.columns) - 2
    body, _ = _body(table, _Form("simple", str, best="*{}"), widest=max(widest, 6))
    return "\n".join(filter(None, (table.title, "", body, "", table.caption)))


def markdown(table: Table) -> str:
    """The table under a heading, its notes beneath."""
    form = _Form("pipe", lambda text: text.replace("|", "\\|"), "**{}**", "*{}*", " [{}]")
    body, notes = _body(table, form)
    parts = [f"## {table.title}", table.caption, body, *notes, *_gaps(table)]
    return "\n\n".join(filter(None, parts)) + "\n"


def latex(table: Table, label: str) -> str:
    """A `table` environment, which needs no package."""
    form = _Form(
        "latex_raw", escape_latex, r"\textbf{{{}}}", r"\textit{{{}}}", r"\textsuperscript{{{}}}"
    )
    body, notes = _body(table, form)
    caption = escape_latex(" ".join(filter(None, (table.title + ".", table.caption))))
    lines = [
        r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{label}}}",
        r"\small", body,
    ]  # fmt: skip
    beneath = r" \par ".join(map(escape_latex, [*notes, *_gaps(table)]))
    if beneath:
        lines.append(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {beneath}}}")
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def html(table: Table) -> str:
    """A `figure` with a `table` in it, its text escaped; its gaps are left to the page."""
    text = _html.escape
    form = _Form(
        "unsafehtml", text, "<b>{}</b>", "<i>{}</i>", "<sup>{}</sup>",
        '<span class="words">{}</span>',
    )  # fmt: skip
    body, notes = _body(table, form)
    caption = f"{text(table.title)}. {text(table.caption)}".strip()
    beneath = "".join(f"<p>{text(note)}</p>" for note in notes)
    return (
        f'<figure class="table"><figcaption>{caption}</figcaption><div class="wide">{body}</div>'
        f'<div class="notes">{beneath}</div></figure>'
    )


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "[": "{[}", "]": "{]}",  # bare, after a line's end, it would be an optional argument
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "±": r"$\pm$", "−": r"$-$", "×": r"$\times$", "·": r"$\cdot$", "≈": r"$\approx$",
    "≤": r"$\leq$", "≥": r"$\geq$", "≪": r"$\ll$", "↓": r"$\downarrow$", "↑": r"$\uparrow$",
    "→": r"$\rightarrow$", "Δ": r"$\Delta$", "∀": r"$\forall$", "∈": r"$\in$",
    "⟨": r"$\langle$", "⟩": r"$\rangle$",
    "ᵀ": r"$^\top$", "√": r"$\surd$", "Σ": r"$\Sigma$", "—": "---", "–": "--",
    "…": r"\ldots{}", "‖": r"$\|$", "µ": r"$\mu$",
}  # fmt: skip
_LATEX |= {one: f"$^{digit}$" for digit, one in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "$^-$"}
_LATEX |= {one: f"$_{digit}$" for digit, one in enumerate("₀₁₂₃₄₅₆₇₈₉")}
for _one in "αβγδεηθκλμνπρστφχψωΓΘΛΠΦΨΩ":
    _name = unicodedata.name(_one).split()[-1].lower().replace("lamda", "lambda")
    _LATEX[_one] = rf"$\{_name.capitalize() if _one.isupper() else _name}$"
_SPECIAL = re.compile("|".join(map(re.escape, _LATEX)))


def escape_latex(text: str) -> str:
    """Text as LaTeX prints it, character for character."""
    return _SPECIAL.sub(lambda found: _LATEX[found.group()], text)
