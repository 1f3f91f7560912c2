"""ARC and MMLU: which of a question's choices the model finds likeliest.

Test splits: 2,376 questions (ARC-Easy), 1,172 (ARC-Challenge), and MMLU's 14,042 of 57 subjects,
scored overall (each question counts the same) and for each subject.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from lrkv_jax.data.tasks import choices as letter_questions
from lrkv_jax.data.tasks import harness
from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.data.tasks.harness import Ranking, first_shots
from lrkv_jax.errors import LrkvError
from lrkv_jax.evals.benchmark import BenchmarkSettings, Questions, Result, mean, measured
from lrkv_jax.evals.language_model import LanguageModel

Template = Callable[..., Ranking]


def multiple_choice(
    name: str, template: Template, *, normalised: bool
) -> Callable[[LanguageModel, Questions, BenchmarkSettings], Result]:
    """A benchmark of the set `name`; `template` renders a question in harness style.

    normalised: whether the harness-style score is acc_norm (log-likelihood over the choice's
    characters) rather than acc; both are reported.
    """

    def benchmark(model: LanguageModel, asked: Questions, settings: BenchmarkSettings) -> Result:
        if settings.style == "letters":
            return _by_letter(model, asked.examples)
        shots = settings.shots_of(name)
        rankings = [
            template(example, first_shots(asked.shots, shots, example))
            for example in asked.examples
        ]
        return _by_likelihood(model, asked.examples, rankings, normalised)

    return benchmark


def _by_letter(model: LanguageModel, examples: list[Choices]) -> Result:
    """The likeliest label right after the assistant's turn begins (the recipe's way)."""
    prompts, ids = [], []
    for example in examples:
        prompts.append(model.chat_prompt(letter_questions.conversation(example).unanswered()))
        encoded = [model.tokenizer.encode(label) for label in example.labels]
        if any(len(label) != 1 for label in encoded):
            raise LrkvError(
                f"{example.id}: labels {', '.join(example.labels)} are not one token each with "
                f"tokenizer {model.tokenizer.name}: use --style harness"
            )
        ids.append([int(label[0]) for label in encoded])
    records = []
    for example, prompt, log_p in zip(
        examples, prompts, model.next_log_p(prompts, ids), strict=True
    ):
        chosen = int(np.argmax(log_p))
        records.append(
            {
                "id": example.id,
                **_subject(example),
                "gold": example.labels[example.answer],
                "answer": example.labels[chosen],
                "correct": chosen == example.answer,
                "log_p": dict(zip(example.labels, map(float, log_p), strict=True)),
                "prompt_tokens": len(prompt),
            }
        )
    return _result("accuracy", records, "correct")


def _by_likelihood(
    model: LanguageModel, examples: list[Choices], rankings: list[Ranking], normalised: bool
) -> Result:
    """The choice that is the likeliest continuation (the lm-evaluation-harness's way)."""
    asked = []
    for ranking in rankings:
        pairs = [model.pair(ranking.context, text) for text in ranking.continuations]
        asked.append((pairs[0][0], [continuation for _, continuation in pairs]))
    records = []
    scores = model.log_likelihoods(asked)
    for example, ranking, (prompt, _), row in zip(examples, rankings, asked, scores, strict=True):
        log_p = np.array([score.log_p for score in row])
        chosen, by_length = int(log_p.argmax()), int((log_p / np.array(ranking.lengths)).argmax())
        records.append(
            {
                "id": example.id,
                **_subject(example),
                "gold": ranking.gold,
                "answer": chosen,
                "answer_norm": by_length,
                "correct": chosen == ranking.gold,
                "correct_norm": by_length == ranking.gold,
                "log_p": log_p.tolist(),
                "prompt_tokens": len(prompt),
            }
        )
    key = "correct_norm" if normalised else "correct"
    result = _result("acc_norm" if normalised else "acc", records, key)
    for name, values in (("acc", "correct"), ("acc_norm", "correct_norm")):
        result.more |= measured(name, [record[values] for record in records])
    return result


def _result(measure: str, records: list[dict[str, Any]], key: str) -> Result:
    right = [record[key] for record in records]
    more: dict[str, Any] = measured(measure, right)
    subjects = sorted({record["subject"] for record in records if "subject" in record})
    if subjects:
        more["subjects"] = {
            subject: measured(measure, [r[key] for r in records if r["subject"] == subject])
            for subject in subjects
        }
    return Result(measure, mean(right), records, more)


def _subject(example: Choices) -> dict[str, str]:
    return {} if example.subject is None else {"subject": example.subject}


# ARC's choices differ in length: published scores are acc_norm. MMLU's continuations are letters.
arc_easy = multiple_choice("arc_easy", harness.arc, normalised=True)
arc_challenge = multiple_choice("arc_challenge", harness.arc, normalised=True)
mmlu = multiple_choice("mmlu", harness.mmlu, normalised=False)
