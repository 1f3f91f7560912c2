"""HumanEval: 164 functions to write, each right where its own tests pass in the sandbox."""

from dataclasses import asdict

from lrkv_jax.data.tasks import humaneval as programs
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkSettings, Questions, Result, passed
from lrkv_jax.evaluation.sandbox import SandboxLimits, isolation, run_programs
from lrkv_jax.inference.language_model import LanguageModel


def humaneval(model: LanguageModel, asked: Questions, settings: BenchmarkSettings) -> Result:
    """Score programs that are asked for in a chat.

    pass@k with the unbiased estimator (Chen et al. 2021). Raises `LrkvError` unless
    `settings.run_model_code` says that the programs may run.
    """
    check(settings)
    examples = asked.examples
    prompts = [model.chat_prompt(programs.conversation(e).unanswered()) for e in examples]
    said = [
        [answer.text(model.chat) for answer in samples]
        for samples in model.answers(prompts, settings.new_tokens, settings.draws())
    ]
    sources = [
        programs.whole_program(example, text)
        for example, texts in zip(examples, said, strict=True)
        for text in texts
    ]
    limits = SandboxLimits()
    outcomes = iter(run_programs(sources, limits=limits, workers=settings.workers))
    records = []
    for example, prompt, texts in zip(examples, prompts, said, strict=True):
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
    result.more["sandbox"] = {"isolation": isolation().as_dict(), "limits": asdict(limits)}
    return result


def check(settings: BenchmarkSettings) -> None:
    """Raise `LrkvError` where programs may not run, or no sandbox can hold them."""
    if not settings.run_model_code:
        raise LrkvError(
            "humaneval runs programs that the model wrote: allow it with --run-model-code "
            "(docs/sandbox.md says what keeps them in)"
        )
    isolation()
