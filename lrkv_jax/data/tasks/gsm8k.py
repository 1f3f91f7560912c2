"""openai/gsm8k: word problems with calculator spans (Cobbe et al., arXiv 2110.14168)."""

import re
from dataclasses import dataclass
from typing import Any

from lrkv_jax.data.conversation import Conversation, Kind, Message, Part, text_message
from lrkv_jax.errors import LrkvError

_FINAL = re.compile(r"#### (\-?[0-9\.\,]+)")
_SPAN = re.compile(r"(<<[^>]+>>)")


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A word problem. answer_text: the worked solution with its spans; answer: the final number."""

    id: str
    question: str
    answer_text: str
    answer: str


def example(row: dict[str, Any], id: str) -> WordProblem:
    """A row, `question, answer`: spans like `<<48/2=24>>`, the number after `#### ` at the end.

    Raises LrkvError without a final number.
    """
    final = extract_answer(row["answer"])
    if final is None:
        raise LrkvError("column 'answer' has no final number after '#### '")
    return WordProblem(id, row["question"], row["answer"], final)


def conversation(problem: WordProblem) -> Conversation:
    """The problem, and its solution with each span as a tool call and its output.

    The recipe's rule (nanochat, tasks/gsm8k.py): a span is cut at its last "="; the text around it
    stays as it is, the result that the set repeats after a span included. Empty parts fall away.
    """
    parts: list[tuple[Kind, str]] = []
    for piece in _SPAN.split(problem.answer_text):
        if not _SPAN.fullmatch(piece):
            parts.append(("text", piece))
            continue
        expression, equals, result = piece[2:-2].rpartition("=")
        parts.append(("python", expression if equals else result))
        parts.append(("output", result if equals else ""))
    written = tuple(Part(kind, text) for kind, text in parts if text)
    return Conversation((text_message("user", problem.question), Message("assistant", written)))


def extract_answer(text: str) -> str | None:
    """The number after the first "#### ", commas taken out, or None: the recipe's rule.

    It is OpenAI's rule too (grade_school_math/dataset.py): a final full stop stays part of
    the number, and "#### $5" holds none.
    """
    match = _FINAL.search(text)
    return match.group(1).replace(",", "") if match else None


def is_correct(text: str, problem: WordProblem) -> bool:
    """Whether a completion's extracted number is the problem's, as strings: 18.0 is not 18."""
    return extract_answer(text) == problem.answer
