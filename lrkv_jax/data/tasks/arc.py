"""allenai/ai2_arc: grade-school science, easy and challenge (Clark et al., arXiv 1803.05457)."""

from __future__ import annotations

from lrkv_jax.data.tables import Schema
from lrkv_jax.data.tasks.examples import Choices
from lrkv_jax.errors import LrkvError


class _Choices(Schema):
    text: list[str]
    label: list[str]


class Row(Schema):
    """`id, question, choices{text[], label[]}, answerKey`: three to five choices, A–E or 1–5."""

    id: str
    question: str
    choices: _Choices
    answerKey: str


def example(row: Row, id: str) -> Choices:
    """A row as a choice, under the set's own id and labels.

    Raises LrkvError for no choices, texts and labels of unequal number, doubled labels, or an
    answer key outside the labels.
    """
    labels = tuple(row.choices.label)
    if row.answerKey not in labels:
        there = ", ".join(labels) or "no labels"
        raise LrkvError(f"column 'answerKey' is {row.answerKey!r}: not in {there}")
    return Choices(
        row.id, row.question, tuple(row.choices.text), labels, labels.index(row.answerKey)
    )
