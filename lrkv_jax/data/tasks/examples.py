"""What a benchmark's row becomes: a choice among answers, a problem with a number, a program."""

from __future__ import annotations

from dataclasses import dataclass

from lrkv_jax.errors import LrkvError


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


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem. answer_text: the worked solution with its spans; answer: the final number."""

    id: str
    question: str
    answer_text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Program:
    """A function to complete. prompt: its start; test: code that defines `check(candidate)`."""

    id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str
