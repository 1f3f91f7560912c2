"""Models made to write an answer: calls are answered, texts end, programs run or do not."""

from itertools import combinations, product

import numpy as np
import pytest
from support.hand_built import follows, language_model, says

from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.tasks.humaneval import Program
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkSettings, Questions, questions
from lrkv_jax.evaluation.evaluate import BENCHMARKS
from lrkv_jax.evaluation.tasks import pass_at_k, passed
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.language_model import Draws

TOKENIZER = load_tokenizer("sotu-4096")
CHAT = ChatFormat(TOKENIZER)
IDS = CHAT.ids
DEMO = BenchmarkSettings(folder="demo", new_tokens=24)


def token(text):
    (one,) = TOKENIZER.encode(text).tolist()
    return one


def chain(*ids):
    return dict(zip(ids, ids[1:], strict=False))


# Calls the calculator with 4*5, and after its output says ".".
CALLS = follows(
    TOKENIZER,
    {
        **chain(IDS.assistant_start, IDS.python_start, *map(token, "4*5"), IDS.python_end),
        **chain(IDS.output_end, token("."), IDS.assistant_end),
    },
)  # fmt: skip


def prompt(text):
    return [TOKENIZER.bos, *CHAT.turn(text)]


def test_a_call_is_answered_inside_the_answer_and_its_budget():
    """An answer takes no more, whatever the others take."""
    model = language_model(TOKENIZER, CALLS)
    prompts = [prompt("How much?" * n) for n in (1, 7, 2, 3, 4)]
    for (answer,) in model.answers(prompts, 24, Draws()):
        assert answer.text(CHAT) == "<<4*5=20>>." and answer.ended
        assert answer.calls == [("4*5", "20")]
    whole = model.answers([prompt("a")], 24, Draws())[0][0].ids
    for budget in range(1, len(whole) + 1):
        one, other = (a for (a,) in model.answers([prompt("a"), prompt("b" * 40)], budget, Draws()))
        assert one.ids == other.ids == whole[: len(one.ids)] and len(one.ids) <= budget
        # An output comes whole or not at all.
        assert len(one.ids) == budget or one.ids[-1] == IDS.python_end


@pytest.mark.slow
def test_gsm8k_counts_the_problems_whose_number_it_says():
    asked = questions("gsm8k", "test", DEMO)
    gpt2 = load_tokenizer("gpt2")  # in which #### is one token
    gold = next(e.answer for e in asked.examples if len(gpt2.encode(f" {e.answer}")) == 1)
    result = BENCHMARKS["gsm8k"](
        language_model(gpt2, says(gpt2, f"It is #### {gold}")), asked, DEMO
    )
    assert {record["answers"][0] for record in result.records} == {gold}
    assert result.score == np.mean([problem.answer == gold for problem in asked.examples]) > 0
    assert result.measure == "pass@1" and all(record["ended"][0] for record in result.records)


def test_a_text_ends_at_the_first_stop_string():
    table = chain(*map(token, (":", " The", " people", " of", " our", ".")))
    model = language_model(TOKENIZER, follows(TOKENIZER, table))
    prompts = [model.prompt("Answer:"), model.prompt("A longer question, and its Answer:")]
    assert model.continuations(prompts, 20, (), Draws()) == [[" The people of our."]] * 2
    for until, text in (((" our", " of"), " The people"), (("people",), " The "), ((" The",), "")):
        assert model.continuations(prompts[:1], 20, until, Draws())[0] == [text]


@pytest.mark.slow
def test_samples_are_an_examples_own():
    """Whatever the batch; and different from each other."""
    made = follows(TOKENIZER, {}, noise=1.0, strength=0.0)
    draws = Draws(Sampling(1.0), seed=3, samples=3)
    prompts = [prompt("a"), prompt("bb"), prompt("a")]
    texts = language_model(TOKENIZER, made).continuations(prompts, 6, (), draws)
    alone = language_model(TOKENIZER, made, batch=1).continuations(prompts, 6, (), draws)
    assert texts == alone
    assert len({t for row in texts for t in row}) == 9
    with pytest.raises(LrkvError, match="new_tokens = 512: use 1 to 511"):
        language_model(TOKENIZER, made).continuations(prompts, 512, (), draws)


def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_pass():
    for n, c, k in product(range(1, 9), repeat=3):
        if max(c, k) <= n:
            draws = [any(draw) for draw in combinations([i < c for i in range(n)], k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    assert pass_at_k(4, 0, 2) == 0
    result = passed([{"correct": [True, False, False, False]}, {"correct": [False] * 4}])
    assert result.score == result.more["pass@1"] == 1 / 8
    assert result.more["pass@2"] == pytest.approx((1 - 3 * 2 / (4 * 3)) / 2)
    assert result.more["pass@4"] == 0.5 and "pass@3" not in result.more


def test_humaneval_passes_the_programs_that_pass():
    """The model says `run = print`, whatever is asked."""
    allowed = BenchmarkSettings(folder="demo", new_tokens=24, run_model_code=True)
    tests = {"any": "pass", "print": "assert f() is None", "no_print": "assert f() == 3"}
    examples = [
        Program(name, "def run():\n", "    return 3\n", f"def check(f):\n    {line}\n", "run")
        for name, line in tests.items()
    ]
    model = language_model(TOKENIZER, says(TOKENIZER, "run = print"))
    with pytest.raises(LrkvError, match="--run-model-code"):
        BENCHMARKS["humaneval"](model, Questions(examples, {}), DEMO)
    result = BENCHMARKS["humaneval"](model, Questions(examples, {}), allowed)
    assert [record["correct"] for record in result.records] == [[True], [True], [False]]
    assert result.records[2]["reasons"] == ["raised AssertionError"]
    assert result.score == pytest.approx(2 / 3)
    assert result.more["sandbox"]["seconds"] == 10
