"""Multiple choice: ARC (Clark et al., arXiv 1803.05457), MMLU (Hendrycks et al., arXiv 2009.03300).

A row of either set becomes a `Choices`; `question` and `conversation` ask it as the recipe does:
the letter comes after its choice, and answers it.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import model_validator

from lrkv_jax.data.conversation import Conversation, exchange
from lrkv_jax.data.tables import Schema
from lrkv_jax.errors import LrkvError

LABELS = ("A", "B", "C", "D")


@dataclass(frozen=True, slots=True)
class Choices:
    """A question with labelled choices, one of which is right.

    answer: index into `choices`; labels: as the set writes them (A, B, … or 1, 2, …); subject:
    MMLU's, None elsewhere.

    Raises LrkvError for fewer than two choices, labels that are not one for each choice, doubled
    labels, or an answer outside.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int
    subject: str | None = None

    def __post_init__(self):
        count = len(self.choices)
        if count < 2:
            raise LrkvError(f"{count} choices: a question needs two or more")
        if len(set(self.labels)) != count or len(self.labels) != count:
            labels = ", ".join(self.labels)
            raise LrkvError(f"labels {labels} of {count} choices: give one to each")
        if not 0 <= self.answer < count:
            raise LrkvError(f"answer {self.answer} is outside the {count} choices")


class _ArcChoices(Schema):
    text: list[str]
    label: list[str]


class ArcRow(Schema):
    """allenai/ai2_arc: `id, question, choices{text[], label[]}, answerKey`.

    Three to five choices, labelled A–E or 1–5.
    """

    id: str
    question: str
    choices: _ArcChoices
    answerKey: str


def arc_example(row: ArcRow, id: str) -> Choices:
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


class MmluRow(Schema):
    """cais/mmlu: `question, choices[4], answer: int, subject`.

    The rows of auxiliary_train lie inside an extra `train` struct; both forms are read.
    """

    question: str
    choices: list[str]
    answer: int
    subject: str

    @model_validator(mode="before")
    @classmethod
    def _unwrap(cls, row: Any) -> Any:
        nested = row.get("train") if isinstance(row, dict) else None
        return nested if isinstance(nested, dict) else row


def mmlu_example(row: MmluRow, id: str) -> Choices:
    """A row as a choice. auxiliary_train's rows name no subject: theirs is None.

    Raises LrkvError for other than four choices, or an answer outside them.
    """
    if len(row.choices) != len(LABELS):
        raise LrkvError(f"column 'choices' holds {len(row.choices)}: MMLU has four")
    return Choices(id, row.question, tuple(row.choices), LABELS, row.answer, row.subject or None)


def question(example: Choices) -> str:
    """The user's message (nanochat, tasks/common.py:render_mc).

    The letter stands after the choice, which small models bind better, and right after "=", so that
    it is the very token of the answer (" A" is another one). The letters are the set's own labels:
    ARC's numeric ones are shown, and answered, as 1, 2, 3, 4.
    """
    pairs = zip(example.choices, example.labels, strict=True)
    lines = "".join(f"- {choice}={label}\n" for choice, label in pairs)
    return (
        f"Multiple Choice question: {example.question}\n{lines}\n"
        "Respond only with the letter of the correct answer."
    )


def conversation(example: Choices) -> Conversation:
    """The question and, as the whole answer, the right letter."""
    return exchange(question(example), example.labels[example.answer])
