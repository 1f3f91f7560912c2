"""Multiple choice: ARC (Clark et al., arXiv 1803.05457), MMLU (Hendrycks et al., arXiv 2009.03300).

A row of either set becomes a `Choices`; `question` and `conversation` write it as the
recipe does: the letter comes after its choice, and is the answer.
"""

from dataclasses import dataclass
from typing import Any

from lrkv_jax.data.conversation import Conversation, exchange
from lrkv_jax.errors import LrkvError

LABELS = ("A", "B", "C", "D")


@dataclass(frozen=True, slots=True)
class Choices:
    """A question with labeled choices, one of which is right.

    answer: index into `choices`; labels: as the set writes them (A, B, … or 1, 2, …);
    subject: MMLU's, None elsewhere.

    Raises LrkvError for labels that are not one for each choice, and an answer outside.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int
    subject: str | None = None

    def __post_init__(self):
        count = len(self.choices)
        if len(set(self.labels)) != count or not 0 <= self.answer < count:
            labels = ", ".join(self.labels)
            raise LrkvError(f"{count} choices, labels {labels} and answer {self.answer} disagree")


def arc_example(row: dict[str, Any], id: str) -> Choices:
    """A row of allenai/ai2_arc: `id, question, choices{text[], label[]}, answerKey`.

    Three to five choices, labeled A–E or 1–5; a choice keeps the set's id and labels.
    """
    labels = tuple(row["choices"]["label"])
    answer = labels.index(row["answerKey"])
    return Choices(row["id"], row["question"], tuple(row["choices"]["text"]), labels, answer)


def mmlu_example(row: dict[str, Any], id: str) -> Choices:
    """A row of cais/mmlu: `question, choices[4], answer: int, subject`.

    The rows of auxiliary_train are inside an extra `train` struct, and name no subject.
    """
    row = row.get("train") or row
    choices, subject = tuple(row["choices"]), row["subject"] or None
    return Choices(id, row["question"], choices, LABELS, row["answer"], subject)


def question(example: Choices) -> str:
    """The user's message (nanochat, tasks/common.py:render_mc).

    The letter comes after the choice, which small models bind better, and right after
    "=", so that it is the very token of the answer (" A" is another one). The letters
    are the set's labels: ARC's numeric ones are shown, and answered, as 1, 2, 3, 4.
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
