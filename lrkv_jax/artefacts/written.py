"""A table as Markdown, LaTeX (booktabs) and HTML, and on a terminal."""

import html as _html
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.markup import escape
from rich.table import Table as Terminal

from lrkv_jax.artefacts.table import Cell, Column, Table, written_number

MARKS = (
    "Bold: the best mean of its block; ≈: not significantly different from the best (seeds as "
    "blocks, p adjusted by Holm, p ≥ 0.05)."
)
ONE_SEED = "Bold: the best value of its block; with one seed no difference can be told from noise."
_NONE = "—"
_WORDS = 30  # characters; a longer cell is text, whose lines are broken


@dataclass(frozen=True)
class _Part:
    """A cell's text, whether it is the best, and the footnotes that it carries."""

    text: str
    best: bool
    footnotes: tuple[int, ...]


class _Written:
    """A table's cells as text, and its notes, in no format yet."""

    def __init__(self, table: Table):
        self.table = table
        self.footnotes: list[str] = []
        marks = table.marks()
        self.rows = [
            (row.block, [
                self._part(cell, column, marks.get((y, x)))
                for x, (cell, column) in enumerate(zip(row.cells, table.columns, strict=True))
            ])
            for y, row in enumerate(table.rows)
        ]  # fmt: skip
        self.notes = list(table.notes)
        if marks:
            seeds = max(len(row.cells[x].seeds) for row in table.rows for _, x in marks)
            self.notes.append(MARKS if seeds > 1 else ONE_SEED)
        self.gaps = ["Gaps: " + "; ".join(table.gaps) + "."] if table.gaps else []
        self.numbered = [f"[{n}] {text}" for n, text in enumerate(self.footnotes, 1)]

    def blocks(self):
        """(block, its rows' parts), in order."""
        for block, rows in groupby(self.rows, key=lambda row: row[0]):
            yield block, [parts for _, parts in rows]

    def groups(self) -> list[tuple[str, int]]:
        """The headings over the columns, with how many columns each spans; empty if none."""
        spans = [(g, len(list(same))) for g, same in groupby(self.table.columns, lambda c: c.group)]
        return spans if any(group for group, _ in spans) else []

    def _part(self, cell: Cell, column: Column, mark: str | None) -> _Part:
        text = _NONE if cell.value is None else str(cell.value)
        if isinstance(cell.value, int | float) and not isinstance(cell.value, bool):
            text = written_number(cell.value, column)
        if cell.sd is not None:
            sd = f"{cell.sd:.{column.digits}f}"
            text += f" ± {sd if float(sd) or not cell.sd else f'{cell.sd:.1g}'}"
        if mark == "level":
            text += " ≈"
        numbers = [self._footnote(cell.note)] if cell.note else []
        if cell.printed:
            text += f" (paper {cell.printed.text})"
            if cell.printed.verdict:
                numbers.append(self._footnote(cell.printed.verdict))
        return _Part(text, mark == "best", tuple(numbers))

    def _footnote(self, text: str) -> int:
        if text not in self.footnotes:
            self.footnotes.append(text)
        return self.footnotes.index(text) + 1


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


def terminal(table: Table) -> Terminal:
    """The table for a terminal, without footnotes, notes and gaps."""
    written = _Written(table)
    shown = Terminal(title=table.title, caption=table.caption or None)
    for place, column in enumerate(table.columns):
        shown.add_column(escape(column.heading), justify="right" if place else "left")
    for block, rows in written.blocks():
        if block:
            shown.add_row(f"[italic]{escape(block)}[/]")
        for parts in rows:
            texts = [escape(part.text) for part in parts]
            bold = [part.best for part in parts]
            pairs = zip(texts, bold, strict=True)
            shown.add_row(*(f"[bold]{text}[/]" if best else text for text, best in pairs))
    return shown


def markdown(table: Table) -> str:
    """The table under a heading, its notes beneath."""
    written = _Written(table)

    def cell(part: _Part) -> str:
        text = part.text.replace("|", "\\|")
        text = f"**{text}**" if part.best else text
        return text + "".join(f" [{n}]" for n in part.footnotes)

    headings = [
        f"{column.group} {column.heading}".strip().replace("|", "\\|") for column in table.columns
    ]
    rules = [":--" if not place else "--:" for place in range(len(headings))]
    lines = [f"## {table.title}", ""]
    lines += [table.caption, ""] if table.caption else []
    lines += [f"| {' | '.join(headings)} |", f"| {' | '.join(rules)} |"]
    for block, rows in written.blocks():
        if block:
            heading = block.replace("|", "\\|")
            lines.append(f"| *{heading}* |{' |' * (len(headings) - 1)}")
        lines += [f"| {' | '.join(map(cell, parts))} |" for parts in rows]
    notes = (*written.numbered, *written.notes, *written.gaps)
    lines += ["", *(f"{note}\n" for note in notes)]
    return "\n".join(lines).rstrip() + "\n"


def latex(table: Table, label: str) -> str:
    """A `table` environment; needs the package booktabs alone."""
    written = _Written(table)

    def cell(part: _Part) -> str:
        text = escape_latex(part.text)
        text = rf"\textbf{{{text}}}" if part.best else text
        marks = ",".join(map(str, part.footnotes))
        return text + (rf"\textsuperscript{{{marks}}}" if marks else "")

    width = len(table.columns)
    lines = [
        r"\begin{table}[t]", r"\centering",
        rf"\caption{{{escape_latex(' '.join(filter(None, (table.title + '.', table.caption))))}}}",
        rf"\label{{tab:{label}}}", r"\small",
        rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule",
    ]  # fmt: skip
    if groups := written.groups():
        heads, rules, first = [], [], 1
        for group, span in groups:
            heads.append(rf"\multicolumn{{{span}}}{{c}}{{{escape_latex(group)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{first}-{first + span - 1}}}")
            first += span
        lines += [" & ".join(heads) + r" \\", " ".join(rules)]
    lines += [" & ".join(escape_latex(c.heading) for c in table.columns) + r" \\", r"\midrule"]
    for place, (block, rows) in enumerate(written.blocks()):
        if place:
            lines.append(r"\midrule")
        if block:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape_latex(block)}}}}} \\")
        lines += [" & ".join(map(cell, parts)) + r" \\" for parts in rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [escape_latex(t) for t in (*written.numbered, *written.notes, *written.gaps)]
    if notes:
        beneath = r" \par ".join(notes)
        lines.append(rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {beneath}}}")
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def html(table: Table) -> str:
    """A `figure` with a `table` in it, its text escaped; its gaps are left to the page."""
    written, text = _Written(table), _html.escape

    def cell(tag: str) -> Callable[[_Part], str]:
        def one(part: _Part) -> str:
            inner = f"<b>{text(part.text)}</b>" if part.best else text(part.text)
            marks = ",".join(map(str, part.footnotes))
            words = ' class="words"' if len(part.text) > _WORDS else ""
            return f"<{tag}{words}>{inner}{f'<sup>{marks}</sup>' if marks else ''}</{tag}>"

        return one

    head = ""
    if groups := written.groups():
        head = "".join(f'<th colspan="{span}">{text(group)}</th>' for group, span in groups)
        head = f"<tr>{head}</tr>"
    head += "<tr>" + "".join(f"<th>{text(c.heading)}</th>" for c in table.columns) + "</tr>"
    body = []
    for block, rows in written.blocks():
        if block:
            body.append(
                f'<tr class="block"><th colspan="{len(table.columns)}">{text(block)}</th></tr>'
            )
        for first, *rest in rows:
            body.append("<tr>" + cell("th")(first) + "".join(map(cell("td"), rest)) + "</tr>")
    notes = "".join(f"<p>{text(note)}</p>" for note in (*written.numbered, *written.notes))
    caption = f"{text(table.title)}. {text(table.caption)}".strip()
    return (
        f'<figure class="table"><figcaption>{caption}</figcaption><div class="wide"><table>'
        f"<thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
        f'<div class="notes">{notes}</div></figure>'
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
