"""ARC and MMLU: which of a question's choices the model finds likeliest.

Test splits: 2,376 questions (ARC-Easy), 1,172 (ARC-Challenge), and MMLU's 14,042 of 57
subjects, scored overall (each question counts the same) and for each subject.
"""

from typing import Any

import numpy as np

from lrkv_jax.data.tasks import choices as letter_questions
from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkResult, BenchmarkSettings, Questions, measured
from lrkv_jax.inference.language_model import LanguageModel


def multiple_choice(
    model: LanguageModel, asked: Questions, settings: BenchmarkSettings
) -> BenchmarkResult:
    """The likeliest label right after the assistant's turn begins (the recipe's way)."""
    examples: list[Choices] = asked.examples
    prompts, ids = [], []
    for example in examples:
        prompts.append(model.chat_prompt(letter_questions.conversation(example).unanswered()))
        encoded = [model.tokenizer.encode(label) for label in example.labels]
        if any(len(label) != 1 for label in encoded):
            raise LrkvError(
                f"{example.id}: labels {', '.join(example.labels)} are not one token each with "
                f"tokenizer {model.tokenizer.name}: use lrkv harness"
            )
        ids.append([int(label[0]) for label in encoded])
    records: list[dict[str, Any]] = []
    for example, prompt, log_p in zip(
        examples, prompts, model.next_log_p(prompts, ids), strict=True
    ):
        chosen = int(np.argmax(log_p))
        records.append(
            {
                "id": example.id,
                **({} if example.subject is None else {"subject": example.subject}),
                "gold": example.labels[example.answer],
                "answer": example.labels[chosen],
                "correct": chosen == example.answer,
                "log_p": dict(zip(example.labels, map(float, log_p), strict=True)),
                "prompt_tokens": len(prompt),
            }
        )
    right = [record["correct"] for record in records]
    more: dict[str, Any] = measured("accuracy", right)
    subjects = sorted({record["subject"] for record in records if "subject" in record})
    if subjects:
        more["subjects"] = {
            subject: measured(
                "accuracy", [r["correct"] for r in records if r["subject"] == subject]
            )
            for subject in subjects
        }
    return BenchmarkResult("accuracy", more["accuracy"], records, more)
