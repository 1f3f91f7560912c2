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
_SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology
college_chemistry college_computer_science college_mathematics college_medicine college_physics
computer_security conceptual_physics econometrics electrical_engineering elementary_mathematics
formal_logic global_facts high_school_biology high_school_chemistry high_school_computer_science
high_school_european_history high_school_geography high_school_government_and_politics
high_school_macroeconomics high_school_mathematics high_school_microeconomics high_school_physics
high_school_psychology high_school_statistics high_school_us_history high_school_world_history
human_aging human_sexuality international_law jurisprudence logical_fallacies machine_learning
management marketing medical_genetics miscellaneous moral_disputes moral_scenarios nutrition
philosophy prehistory professional_accounting professional_law professional_medicine
professional_psychology public_relations security_studies sociology us_foreign_policy virology
world_religions
"""
SUBJECTS = tuple(_SUBJECTS.split())


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
        if len(self.labels) != count:
            raise LrkvError(f"{count} choices and {len(self.labels)} labels: give one to each")
        if len(set(self.labels)) != count:
            raise LrkvError(f"labels {', '.join(self.labels)}: no two may be the same")
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

    Raises LrkvError for other than four choices, an answer outside them, or an unknown subject.
    """
    if len(row.choices) != len(LABELS):
        raise LrkvError(f"column 'choices' holds {len(row.choices)}: MMLU has four")
    if row.subject and row.subject not in SUBJECTS:
        raise LrkvError(f"column 'subject' is {row.subject!r}: none of MMLU's 57 subjects")
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
