"""Tables: what is marked as best, what is escaped, and that a gap is told."""

import json
import re

import pytest

from lrkv_jax.lab.report.printed import Printed
from lrkv_jax.lab.report.table import Cell, Column, Row, Table, no_run
from lrkv_jax.lab.report.written import escape_latex, html, latex, terminal, write_table
from lrkv_jax.lab.report.written import markdown as padded

LOSS = Column("CE", "nats/token", "lower", 3)


def table(*rows, columns=None, **rest):
    return Table("Losses", columns or [Column("variant"), LOSS], list(rows), **rest)


def markdown(made):
    """The table without what aligns its columns."""
    return re.sub(" +", " ", padded(made))


def over(*values):
    return Cell.over(dict(enumerate(values)))


def test_the_best_of_each_block_is_marked_in_its_own_direction():
    columns = [Column("variant"), LOSS, Column("score", "%", "higher", 1), Column("bytes")]
    made = table(
        Row.of("a", 2.5, 10.0, 7, block="small"), Row.of("b", 2.4, 12.0, 8, block="small"),
        Row.of("a", 1.5, 30.0, 7, block="large"), Row.of("b", 1.6, 20.0, 8, block="large"),
        columns=columns,
    )  # fmt: skip
    assert made.marks() == {(1, 1): "best", (1, 2): "best", (2, 1): "best", (2, 2): "best"}
    text = markdown(made)
    assert "| b | **2.400** | **12.0** | 8 |" in text and "| a | **1.500** | **30.0** | 7 |" in text


def test_what_is_written_alike_is_best_alike():
    assert table(Row.of("a", 2.4001), Row.of("b", 2.4004), Row.of("c", 2.41)).marks() == {
        (0, 1): "best", (1, 1): "best",
    }  # fmt: skip


def test_what_is_not_significantly_different_is_level():
    """b is 0.1 worse each time; c is worse twice and better once, by a hundredth."""
    made = table(
        Row.of("a", over(2.00, 2.10, 2.20)), Row.of("b", over(2.10, 2.201, 2.30)),
        Row.of("c", over(2.01, 2.09, 2.21)),
    )  # fmt: skip
    assert made.marks() == {(0, 1): "best", (2, 1): "level"}
    assert "**2.100 ± 0.100**" in markdown(made) and "2.103 ± 0.101 ≈" in markdown(made)


def test_one_seed_marks_the_best_and_says_that_it_is_one():
    made = table(Row.of("a", over(2.0)), Row.of("b", over(2.1)))
    assert made.marks() == {(0, 1): "best"}
    assert "with one seed no difference can be told from noise" in markdown(made)


@pytest.mark.parametrize("cell", [no_run("2.5b mla"), Cell("—"), Cell(float("nan"))])
def test_what_is_no_number_is_never_best(cell):
    assert table(Row.of("a", cell), Row.of("b", 2.1), Row.of("c", 2.2)).marks() == {(1, 1): "best"}


def test_a_single_value_is_not_the_best_of_anything():
    assert table(Row.of("a", no_run("x")), Row.of("b", 2.1)).marks() == {}


def test_gaps_are_named_once():
    made = table(Row.of("a", no_run("2.5b mla")), Row.of("b", no_run("2.5b mla")), Row.of("c", 2.0))
    assert made.gaps == ["no run: 2.5b mla"]
    for text in (markdown(made), latex(made, "x")):
        assert text.count("no run: 2.5b mla") == 1
    assert "no run" not in html(made), "a page folds the gaps of a section"
    assert "| a | — |" in markdown(made)


def test_a_printed_value_stands_beside_ours_with_its_verdict():
    printed = Printed(0.872, "0.872", "CE implies 0.875")
    made = table(
        Row.of("a", Cell(0.8712, printed=printed)), Row.of("b", Cell(0.9, printed=printed))
    )
    assert "**0.871 (paper 0.872)** [1]" in markdown(made)
    assert markdown(made).count("CE implies 0.875") == 1
    assert r"\textsuperscript{1}" in latex(made, "x") and "<sup>1</sup>" in html(made)


def test_a_spread_is_never_written_as_nothing():
    assert "2.000 ± 4e-05" in markdown(table(Row.of("a", over(2.0, 2.00005)), Row.of("b", 3.0)))


@pytest.mark.parametrize(
    "text, escaped",
    [
        ("50 % & 2_000 #1 $x {y}", r"50 \% \& 2\_000 \#1 \$x \{y\}"),
        ("a\\b ~ ^", r"a\textbackslash{}b \textasciitilde{} \textasciicircum{}"),
        ("10⁻¹⁸ θ, H₁", r"10$^-$$^1$$^8$ $\theta$, H$_1$"),
        ("[1] a note", "{[}1{]} a note"),
        ("3 ± 0.1 − 2 × 10²", r"3 $\pm$ 0.1 $-$ 2 $\times$ 10$^2$"),
        ("p ≥ 0.05, U_h B_hᵀ", r"p $\geq$ 0.05, U\_h B\_h$^\top$"),
    ],
)
def test_latex_prints_what_is_written(text, escaped):
    assert escape_latex(text) == escaped


def test_latex_is_balanced_and_has_its_rules():
    columns = [Column("variant"), Column("cache", "%", group="MLA"), Column("loss", group="MLA")]
    made = table(
        Row.of("a_1", 8.3, 2.0, block="128M & more"), Row.of("b", 12.5, 2.1, block="2.5B"),
        columns=columns, notes=["100 % of it"],
    )  # fmt: skip
    text = latex(made, "losses")
    for opened in ("table", "tabular"):
        assert text.count(rf"\begin{{{opened}}}") == text.count(rf"\end{{{opened}}}") == 1
    assert "MLA cache, \\%" in text and text.count(r"\hline") == 3
    for line in text.splitlines():
        if line.endswith(r"\\"):
            assert line.replace(r"\&", "").count("&") == 2
    assert text.count("{") == text.count("}")


def test_markdown_cells_stay_in_their_columns():
    made = table(Row.of("a|b", 1.0, block="x|y"), Row.of("c", 2.0, block="x|y"))
    for line in markdown(made).splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 3


def test_a_terminal_shows_blocks_and_marks_the_best():
    rows = [Row.of("a|b", 1.0, block="x"), Row.of("c", 2.0, block="x")]
    lines = terminal(table(*rows)).splitlines()
    assert [line.split() for line in lines[-3:]] == [["x"], ["a|b", "*1.000"], ["c", "2.000"]]


def test_a_terminal_s_table_is_no_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = [Column("variant"), *(Column(f"a long heading of {n} words") for n in range(6))]
    made = table(Row.of("LRKV-8 latent", *["1.2345 (0.1 to 0.2)"] * 6), columns=columns)
    assert max(map(len, terminal(made).splitlines())) <= 80


def test_html_escapes_what_is_text():
    text = html(table(Row.of("<script>", 1.0), Row.of("b", 2.0), notes=["a < b & c"]))
    assert "<script>" not in text and "&lt;script&gt;" in text and "a &lt; b &amp; c" in text


def test_json_has_the_numbers_whole_and_by_seed(tmp_path):
    made = table(Row.of("a", over(2.0, 2.123456789)), Row.of("b", no_run("x")))
    paths = write_table(made, tmp_path / "new", "losses")
    assert [path.name for path in paths] == ["losses.md", "losses.tex", "losses.json"]
    read = json.loads(paths[2].read_text())
    cell = read["rows"][0]["cells"][1]
    assert cell["seeds"] == {"0": 2.0, "1": 2.123456789}
    assert cell["value"] == pytest.approx(2.0617283945) and read["gaps"] == ["no run: x"]


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError):
        markdown(table(Row.of("a", 1.0, 2.0)))
