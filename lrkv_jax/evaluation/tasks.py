"""The benchmark sets: choices that are compared, and answers that are generated in a chat.

ARC and MMLU compare the likelihoods of a question's choices. Test splits have
2,376 questions (ARC-Easy), 1,172 (ARC-Challenge), and MMLU's 14,042 of 57 subjects, scored
overall (each question counts the same) and for each subject. GSM8K's test split has 1,319
word problems, right where the number is; HumanEval has 164 functions to write, each right
where its tests pass in the sandbox.
"""

import math
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np

from lrkv_jax.data.tasks import choices as letter_questions
from lrkv_jax.data.tasks import gsm8k as problems
from lrkv_jax.data.tasks import humaneval as programs
from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkResult, BenchmarkSettings, Questions, measured
from lrkv_jax.evaluation.sandbox import SandboxLimits, check_sandbox, run_programs
from lrkv_jax.inference.language_model import LanguageModel


def multiple_choice(
    model: LanguageModel, questions: Questions, settings: BenchmarkSettings
) -> BenchmarkResult:
    """The likeliest label right after the assistant's turn begins (the recipe's way)."""
    examples: list[Choices] = questions.examples
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


def gsm8k(
    model: LanguageModel, questions: Questions, settings: BenchmarkSettings
) -> BenchmarkResult:
    """Score the word problems, in a chat with the calculator, by the number after "#### "."""
    examples: list[problems.WordProblem] = questions.examples
    prompts = [model.chat_prompt(problems.conversation(e).unanswered()) for e in examples]
    records = []
    answers = model.answers(prompts, settings.max_new_tokens, settings.draws())
    for problem, prompt, samples in zip(examples, prompts, answers, strict=True):
        texts = [answer.text(model.chat) for answer in samples]
        records.append(
            {
                "id": problem.id,
                "gold": problem.answer,
                "answers": [problems.extract_answer(text) for text in texts],
                "correct": [problems.is_correct(text, problem) for text in texts],
                "texts": texts,
                "calls": [answer.calls for answer in samples],
                "ended": [answer.ended for answer in samples],
                "prompt_tokens": len(prompt),
            }
        )
    return passed(records)


def humaneval(
    model: LanguageModel, questions: Questions, settings: BenchmarkSettings
) -> BenchmarkResult:
    """Score programs that the model writes in a chat.

    pass@k with the unbiased estimator (Chen et al. 2021). Raises `LrkvError` unless
    `settings.run_model_code` allows the programs to run.
    """
    check_allowed(settings)
    examples = questions.examples
    prompts = [model.chat_prompt(programs.conversation(e).unanswered()) for e in examples]
    texts_of_examples = [
        [answer.text(model.chat) for answer in samples]
        for samples in model.answers(prompts, settings.max_new_tokens, settings.draws())
    ]
    sources = [
        programs.whole_program(example, text)
        for example, texts in zip(examples, texts_of_examples, strict=True)
        for text in texts
    ]
    limits = SandboxLimits()
    outcomes = iter(run_programs(sources, limits=limits))
    records = []
    for example, prompt, texts in zip(examples, prompts, texts_of_examples, strict=True):
        ran = [next(outcomes) for _ in texts]
        records.append(
            {
                "id": example.id,
                "correct": [outcome.passed for outcome in ran],
                "reasons": [outcome.reason for outcome in ran],
                "texts": texts,
                "prompt_tokens": len(prompt),
            }
        )
    result = passed(records)
    result.more["sandbox"] = asdict(limits)
    return result


def check_allowed(settings: BenchmarkSettings) -> None:
    """Raise `LrkvError` where programs may not run, or no sandbox can hold them."""
    if not settings.run_model_code:
        raise LrkvError(
            "humaneval runs programs that the model wrote: allow it with --run-model-code "
            "(docs/evaluation.md says what keeps them in)"
        )
    check_sandbox()


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k programs, drawn from n of which c pass, passes; 1 <= k <= n.

    The unbiased estimator of Chen et al. (2021), equation 1.
    """
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


def passed(records: list[dict[str, Any]]) -> BenchmarkResult:
    """pass@1, and pass@k for powers of two up to the samples, from each record's `correct`."""
    samples = len(records[0]["correct"])
    more: dict[str, Any] = {"samples": samples}
    for k in (2**n for n in range(samples.bit_length())):
        rates = [pass_at_k(samples, sum(record["correct"]), k) for record in records]
        more |= measured(f"pass@{k}", rates)
    return BenchmarkResult("pass@1", more["pass@1"], records, more)
