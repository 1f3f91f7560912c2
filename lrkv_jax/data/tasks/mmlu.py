"""cais/mmlu: questions with four choices from 57 subjects (Hendrycks et al., arXiv 2009.03300)."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from lrkv_jax.data.tables import Schema
from lrkv_jax.data.tasks.examples import Choices
from lrkv_jax.errors import LrkvError

LABELS = ("A", "B", "C", "D")
SUBJECTS = (
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_chemistry",
    "college_computer_science",
    "college_mathematics",
    "college_medicine",
    "college_physics",
    "computer_security",
    "conceptual_physics",
    "econometrics",
    "electrical_engineering",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_physics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "medical_genetics",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "virology",
    "world_religions",
)


class Row(Schema):
    """`question, choices[4], answer: int, subject`.

    The rows of auxiliary_train sit inside an extra `train` struct; either way is read.
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


def example(row: Row, id: str) -> Choices:
    """A row as a choice. auxiliary_train's rows name no subject: theirs is None.

    Raises LrkvError for other than four choices, an answer outside them, or an unknown subject.
    """
    if len(row.choices) != len(LABELS):
        raise LrkvError(f"column 'choices' holds {len(row.choices)}: MMLU has four")
    if row.subject and row.subject not in SUBJECTS:
        raise LrkvError(f"column 'subject' is {row.subject!r}: none of MMLU's 57 subjects")
    return Choices(id, row.question, tuple(row.choices), LABELS, row.answer, row.subject or None)
