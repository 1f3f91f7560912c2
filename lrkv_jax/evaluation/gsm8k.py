"""GSM8K, test split: 1,319 word problems, answered in writing, right where the number is."""

from lrkv_jax.data.tasks import gsm8k as problems
from lrkv_jax.data.tasks.gsm8k import WordProblem
from lrkv_jax.evaluation.benchmark import BenchmarkSettings, Questions, Result, passed
from lrkv_jax.inference.language_model import LanguageModel


def gsm8k(model: LanguageModel, asked: Questions, settings: BenchmarkSettings) -> Result:
    """Score the word problems, asked in a chat with the calculator, by the number after "#### "."""
    examples: list[WordProblem] = asked.examples
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
