"""Tables: what is marked as best and what is escaped; styles that differ without their colors."""

import json
import re

import pytest

from lrkv_jax.config.attention import variants
from lrkv_jax.lab.report.paper_values import PaperValue
from lrkv_jax.lab.report.renderers import html, terminal, write_table
from lrkv_jax.lab.report.renderers import markdown as padded
from lrkv_jax.lab.report.styles import variant_style
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow

row = TableRow.of
LOSS = Column("CE", "nats/token", "lower", 3)


def table(*rows, columns=None, **rest):
    return Table("Losses", columns or [Column("variant"), LOSS], list(rows), **rest)


def markdown(made):
    """The table without what aligns its columns."""
    return re.sub(" +", " ", padded(made))


def test_the_best_of_each_block_is_marked_in_its_own_direction():
    columns = [Column("variant"), LOSS, Column("score", "%", "higher", 1), Column("bytes")]
    made = table(
        row("a", 2.5, 10.0, 7, block="small"), row("b", 2.4, 12.0, 8, block="small"),
        row("a", 1.5, 30.0, 7, block="large"), row("b", 1.6, 20.0, 8, block="large"),
        columns=columns,
    )  # fmt: skip
    assert made.best() == {(1, 1), (1, 2), (2, 1), (2, 2)}
    text = markdown(made)
    for cell in (Cell(), Cell("—"), Cell(float("nan"))):  # no numbers
        alike = table(row("a", cell), row("b", 2.4001), row("c", 2.4004), row("d", 2.41))
        assert alike.best() == {(1, 1), (2, 1)}, "as they are written"
    assert "| b | **2.400** | **12.0** | 8 |" in text and "| a | **1.500** | **30.0** | 7 |" in text


def test_a_printed_value_stands_beside_ours_with_its_verdict():
    printed = PaperValue(0.872, "0.872", "CE implies 0.875")
    made = table(row("a", Cell(0.8712, paper=printed)), row("b", Cell(0.9, paper=printed)))
    assert "**0.871 (paper 0.872)** [1]" in markdown(made)
    assert markdown(made).count("CE implies 0.875") == 1
    assert "<sup>1</sup>" in html(made)
    text = html(table(row("<script>", 1.0), row("b", 2.0), notes=["a < b & c"]))
    assert "<script>" not in text and "&lt;script&gt;" in text and "a &lt; b &amp; c" in text
    spread = Cell.over({0: 2.0, 1: 2.00005})  # which is never written as nothing
    assert "2.000 ± 4e-05" in markdown(table(row("a", spread), row("b", 3.0)))


def test_json_has_the_numbers_whole_and_by_seed(tmp_path):
    made = table(row("a", Cell.over({0: 2.0, 1: 2.123456789})), row("b", Cell()))
    write_table(made, tmp_path / "new", "losses")
    assert (tmp_path / "new/losses.md").read_text() == padded(made)
    read = json.loads((tmp_path / "new/losses.json").read_text())
    cell = read["rows"][0]["cells"][1]
    assert cell["seeds"] == {"0": 2.0, "1": 2.123456789}
    assert cell["value"] == pytest.approx(2.0617283945)


def test_a_table_of_more_columns_than_a_terminal_has_room_for_is_still_written(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    wide = table(*[row(*"abcdefghij")] * 9, columns=[Column("rate")] * 10)
    assert terminal(wide).split()[-10:] == list("abcdefghij")


def test_variants_differ_without_their_colors():
    styles = [
        variant_style(entry.name, mode) for entry in variants().values() for mode in entry.styles
    ]
    shapes = {(one.line, one.marker) for one in styles}
    assert len({one.color for one in styles}) == len(shapes) == len(styles)
