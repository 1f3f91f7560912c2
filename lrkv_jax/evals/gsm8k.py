"""GSM8K, test split: 1,319 word problems, answered in writing, right where the number is."""

from lrkv_jax.data.tasks import gsm8k as problems
from lrkv_jax.data.tasks.gsm8k import Problem
from lrkv_jax.data.tasks.harness import GSM8K_STOPS, first_shots
from lrkv_jax.data.tasks.harness import gsm8k as harness_prompt
from lrkv_jax.evals.benchmark import BenchmarkSettings, Questions, Result, mean, measured, passed
from lrkv_jax.evals.language_model import LanguageModel


def gsm8k(model: LanguageModel, asked: Questions, settings: BenchmarkSettings) -> Result:
    """Score the word problems.

    Letters style asks in a chat with the calculator and scores the number after "#### ". Harness
    style gives worked examples, no calculator, and scores by strict-match and flexible-extract.
    """
    if settings.style == "letters":
        return _chat(model, asked.examples, settings)
    return _few_shot(model, asked, settings)


def _chat(model: LanguageModel, examples: list[Problem], settings: BenchmarkSettings) -> Result:
    prompts = [model.chat_prompt(problems.conversation(e).unanswered()) for e in examples]
    records = []
    said = model.answers(prompts, settings.new_tokens, settings.draws())
    for problem, prompt, samples in zip(examples, prompts, said, strict=True):
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


def _few_shot(model: LanguageModel, asked: Questions, settings: BenchmarkSettings) -> Result:
    shots = settings.shots_of("gsm8k")
    prompts = [
        model.prompt(harness_prompt(problem, first_shots(asked.shots, shots, problem)))
        for problem in asked.examples
    ]
    records = []
    said = model.continuations(prompts, settings.new_tokens, GSM8K_STOPS, settings.draws())
    for problem, prompt, texts in zip(asked.examples, prompts, said, strict=True):
        flexible = [problems.flexible_extract(text) for text in texts]
        strict = [problems.strict_match(text) for text in texts]
        records.append(
            {
                "id": problem.id,
                "gold": problem.answer,
                "answers": strict,
                "correct": [problems.harness_equal(text, problem) for text in strict],
                "correct_flexible": [problems.harness_equal(text, problem) for text in flexible],
                "texts": texts,
                "prompt_tokens": len(prompt),
            }
        )
    result = passed(records)
    result.more |= measured("flexible", [mean(record["correct_flexible"]) for record in records])
    return result
