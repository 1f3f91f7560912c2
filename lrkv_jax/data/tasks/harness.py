"""The prompts of EleutherAI's lm-evaluation-harness: a context and continuations to rank.

The templates are those of its arc_easy, arc_challenge, mmlu and gsm8k tasks. One thing is fixed
here that it leaves to a seed: the few-shot examples are the first ones of their split, in file
order (what it calls `first_n`, its own choice for MMLU), the same for every question.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.data.tasks.gsm8k import Problem
from lrkv_jax.errors import LrkvError

# Few-shot counts as scores are published: the Open LLM Leaderboard's for ARC-Challenge, MMLU and
# GSM8K; ARC-Easy is not on it, and runs by the harness's default.
SHOTS = {"arc_easy": 0, "arc_challenge": 25, "mmlu": 5, "gsm8k": 5}
# The split the examples come from.
SHOT_SPLIT = {"arc_easy": "train", "arc_challenge": "train", "mmlu": "dev", "gsm8k": "train"}
GSM8K_STOPS = ("Question:", "</s>", "<|im_end|>")
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Ranking:
    """A context and the continuations whose likelihood after it is compared.

    lengths: characters of each choice without the space before it: acc_norm divides each
    log-likelihood by its choice's length before it takes the best, acc does not.
    """

    context: str
    continuations: tuple[str, ...]
    gold: int
    lengths: tuple[int, ...]


def first_shots[Example: (Choices, Problem)](
    examples: Iterable[Example], count: int, asked: Example
) -> tuple[Example, ...]:
    """The first `count` examples, for MMLU of the asked subject, never the asked one itself.

    Raises LrkvError where there are fewer.
    """
    subject = getattr(asked, "subject", None)
    fit = (e for e in examples if e != asked and getattr(e, "subject", None) == subject)
    shots = tuple(islice(fit, count))
    if len(shots) < count:
        of = f" of {subject}" if subject else ""
        raise LrkvError(f"{count} shots{of} asked, {len(shots)} there: ask for fewer")
    return shots


def arc(example: Choices, shots: Sequence[Choices] = ()) -> Ranking:
    """`Question: …\\nAnswer:` continued by each choice's text."""
    solved = [f"{_arc(shot)} {shot.choices[shot.answer]}" for shot in shots]
    return _ranking(_BETWEEN.join([*solved, _arc(example)]), example.choices, example.answer)


def mmlu(example: Choices, shots: Sequence[Choices] = ()) -> Ranking:
    """The subject's headline, the question with its lettered choices, continued by a letter."""
    headline = "The following are multiple choice questions (with answers) about "
    headline += f"{(example.subject or '').replace('_', ' ')}.{_BETWEEN}"
    solved = [f"{_mmlu(shot)} {shot.labels[shot.answer]}" for shot in shots]
    context = headline + _BETWEEN.join([*solved, _mmlu(example)])
    return _ranking(context, example.labels, example.answer)


def gsm8k(problem: Problem, shots: Sequence[Problem] = ()) -> str:
    """`Question: …\\nAnswer:`, to be continued until one of `GSM8K_STOPS`; spans stay in shots."""
    solved = [f"Question: {shot.question}\nAnswer: {shot.answer_text}" for shot in shots]
    return _BETWEEN.join([*solved, f"Question: {problem.question}\nAnswer:"])


def _arc(example: Choices) -> str:
    return f"Question: {example.question}\nAnswer:"


def _mmlu(example: Choices) -> str:
    pairs = zip(example.labels, example.choices, strict=True)
    lines = "".join(f"{label}. {choice}\n" for label, choice in pairs)
    return f"{example.question.strip()}\n{lines}Answer:"


def _ranking(context: str, answers: tuple[str, ...], gold: int) -> Ranking:
    continuations = tuple(f" {answer}" for answer in answers)
    return Ranking(context, continuations, gold, tuple(len(answer) for answer in answers))
