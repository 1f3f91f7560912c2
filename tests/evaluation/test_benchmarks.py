"""Models made to answer score what their answers score, whatever the batch and the devices."""

import copy
import dataclasses
import importlib
import json
import pickle
import sys
from itertools import combinations, product
from pathlib import Path

import jax
import numpy as np
import pytest
from support.hand_built import a_run, calling_run, follows, language_model, says
from support.meshes import mesh_of
from support.variants import random_tokens

from lrkv_jax.config.schema import MixtureConfig, MixturePart
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.data.tasks.humaneval import Program
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkSettings, Questions, questions
from lrkv_jax.evaluation.evaluate import BENCHMARKS, questions_of
from lrkv_jax.evaluation.harness_requests import ChatPrompt, GenerationSettings
from lrkv_jax.evaluation.show import measures
from lrkv_jax.evaluation.tasks import pass_at_k, passed
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.language_model import Draws
from lrkv_jax.models.transformer import with_parameters

TOKENIZER = load_tokenizer("sotu-4096")
CHAT = ChatFormat(TOKENIZER)
DEMO = BenchmarkSettings(folder="demo", max_new_tokens=24)
SETS = ("arc_easy", "arc_challenge", "mmlu")


def token(text):
    (one,) = TOKENIZER.encode(text).tolist()
    return one


# Right after the assistant's turn begins comes B.
ANSWERS_B = follows(TOKENIZER, {CHAT.ids.assistant_start: token("B")}, noise=0.3, strength=3.0)


@pytest.mark.parametrize("name", SETS)
def test_a_model_that_answers_b_scores_exactly_what_b_scores(name):
    asked = questions(name, "test", DEMO)
    result = BENCHMARKS[name](language_model(TOKENIZER, ANSWERS_B), asked, DEMO)
    pairs = zip(asked.examples, result.records, strict=True)
    lettered = [(example, record) for example, record in pairs if "B" in example.labels]
    assert len(lettered) > 8
    assert all(record["answer"] == "B" for _, record in lettered)
    for example, record in zip(asked.examples, result.records, strict=True):
        assert record["id"] == example.id and record["gold"] == example.labels[example.answer]
        assert record["correct"] == (record["answer"] == record["gold"])
        assert max(record["log_p"], key=record["log_p"].get) == record["answer"]
    right = [record["correct"] for record in result.records]
    assert result.score == np.mean(right) and result.measure == "accuracy"
    assert result.more["accuracy_stderr"] == pytest.approx(
        np.std(right, ddof=1) / len(right) ** 0.5
    )
    b_only = [example.labels[example.answer] == "B" for example, _ in lettered]
    assert np.mean([record["correct"] for _, record in lettered]) == np.mean(b_only)
    if name == "mmlu":
        subjects = {example.subject for example in asked.examples}
        of_subject = {
            one: np.mean([r["correct"] for r in result.records if r["subject"] == one])
            for one in subjects
        }
        assert len(set(of_subject.values())) > 1
        found = {one: row["accuracy"] for one, row in result.more["subjects"].items()}
        assert found == pytest.approx(of_subject)


@pytest.mark.slow
def test_likelihoods_depend_on_neither_batch_nor_devices():
    """Questions of different lengths: one at a time against 16 on 8 devices."""
    settings = dataclasses.replace(DEMO, limit=12)

    def log_ps(batch, mesh=None):
        model = language_model(TOKENIZER, ANSWERS_B, batch=batch, mesh=mesh)
        result = BENCHMARKS["mmlu"](model, questions("mmlu", "test", settings), settings)
        return np.array([p for record in result.records for p in record["log_p"].values()])

    alone = log_ps(1)
    assert np.ptp(alone) > 1, "likelihoods do not depend on the text"
    np.testing.assert_allclose(log_ps(16, mesh_of(data=8)), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_likelihoods_are_the_whole_sequence_forwards(window):
    """With a window too, where a long continuation is not scored with others."""
    config, params = ANSWERS_B
    made = config.model_copy(update={"window": window}), params
    model = language_model(TOKENIZER, made)
    context, continuations = "Question: what?\nAnswer:", [" blue", " a green one"]
    if window is not None:
        continuations.append(" of" * 300)
    pairs = [model.pair(context, text) for text in continuations]
    (scores,) = model.log_likelihoods([(pairs[0][0], [ids for _, ids in pairs])])
    forward = jax.jit(with_parameters(*made))
    for (prompt, continuation), score in zip(pairs, scores, strict=True):
        whole = np.zeros((1, 512), np.int32)  # what follows changes nothing: one shape is compiled
        read = len(prompt) + len(continuation)
        whole[0, :read] = prompt + continuation
        log_p = np.asarray(jax.nn.log_softmax(forward(whole)))[0, len(prompt) - 1 : read - 1]
        own = log_p[np.arange(len(continuation)), continuation]
        assert score.log_p == pytest.approx(own.sum(), abs=1e-5 * len(own))
        assert score.greedy == (log_p.argmax(-1) == continuation).all()
    (nexts,) = model.next_log_p([prompt], [continuation])
    np.testing.assert_allclose(nexts, log_p[0, continuation], atol=1e-5)


def ids(count):
    return random_tokens(count, seed=count).tolist()


def test_a_prompt_that_is_too_long_loses_its_beginning_and_is_counted():
    model = language_model(TOKENIZER, ANSWERS_B)
    long, short = TOKENIZER.prompt("word " * 600 + "the end"), TOKENIZER.prompt("the end")
    scores = model.log_likelihoods([(long, [[5, 6]]), (short, [[5, 6]])])
    assert model.truncated == 1
    kept = [TOKENIZER.bos, *long[-510:]]  # 513 positions and predictions, two of the continuation
    (same,) = model.log_likelihoods([(kept, [[5, 6]])])
    assert model.truncated == 1
    assert scores[0][0].log_p == pytest.approx(same[0].log_p, abs=1e-5)
    # A long context beside a long continuation scores what it scores alone.
    asked = [(ids(509), [ids(3)]), (ids(1), [ids(512), ids(2)]), (ids(506), [ids(4)])]
    done, before = [], model.done
    model.progress = done.append
    together = model.log_likelihoods(asked)
    assert done == [before + 1, before + 2, before + 3]
    for question, row in zip(asked, together, strict=True):
        (alone,) = model.log_likelihoods([question])
        log_p = [[score.log_p for score in scores] for scores in (row, alone)]
        np.testing.assert_allclose(*log_p, rtol=1e-5)


def test_what_a_run_cannot_answer_to_is_refused_before_the_work():
    config, params = ANSWERS_B
    few = config.model_copy(update={"vocabulary": 4096})
    for tasks, settings, message in (
        (["bpb", "mmlu"], DEMO, "model.vocabulary = 4096 has no ids for the chat's tokens"),
        (["arc_easy"], DEMO, "not trained to chat, .*: midtrain it, or use lrkv harness RUN"),
        (
            ["gsm8k"],
            dataclasses.replace(DEMO, max_new_tokens=128),
            r"max_new_tokens \(--tokens\) = 128: use 1 to 127",
        ),
        (["humaneval"], DEMO, "--run-model-code"),
        (["agreement"], None, "train.seq_len = 1: agreement .*, leave it out"),
        ([], None, "no task: name a task of bpb, "),
    ):
        context = 1 if "agreement" in tasks else 128
        run = a_run(few if "bpb" in tasks else config, params, context)
        with pytest.raises(LrkvError, match=message):
            questions_of(run.config, tasks, settings)
    for change, message in (
        ({"samples": 4}, "samples = 4 at temperature 0 are all the same"),
        ({"limit": 0}, "limit = 0"),
        ({"temperature": -1.0}, "temperature = -1"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"seed": 10**22}, "seed = 1.*: use a number below 2.63"),
    ):
        with pytest.raises(LrkvError, match=message):
            BenchmarkSettings(**change)


def test_an_evaluation_keeps_its_result_and_every_record(tmp_path, monkeypatch):
    # The package's name `evaluate` is the function.
    module = importlib.import_module("lrkv_jax.evaluation.evaluate")
    run, places = a_run(*ANSWERS_B, context=512), []
    parts = (MixturePart(task="mmlu", split="test"),)
    mixture = MixtureConfig(train=parts, heldout=parts)
    data = run.config.data.model_copy(update={"mixture": mixture})
    config = run.config.model_copy(update={"data": data})
    run = dataclasses.replace(run, config=config)
    with pytest.raises(LrkvError, match="the run has no directory"):
        module.evaluate(run, tasks=["arc_easy"], settings=DEMO)
    run = dataclasses.replace(run, directory=tmp_path)
    monkeypatch.setattr(module, "read_run", lambda *arguments: run.config)
    monkeypatch.setattr(module, "load_run", lambda *arguments, **options: run)
    # As NumPy and pathlib have them.
    first = dataclasses.replace(DEMO, folder=Path("demo"), limit=np.int64(6))
    run = dataclasses.replace(run, step=np.int64(7))
    result = module.evaluate(
        tmp_path, tasks=["arc_easy"], batch=np.int64(4), settings=first,
        progress=lambda *place: places.append(place),
    )  # fmt: skip
    assert places[-1] == ("arc_easy", 6, 6) and result["arc_easy"]["examples"] == 6
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    (kept,) = (tmp_path / "evaluations").iterdir()
    assert kept.name == "arc_easy-step7.json"
    records = json.loads(kept.read_text())["records"]
    right = [record["correct"] for record in records]
    assert len(records) == 6 and result["arc_easy"]["score"] == np.mean(right)

    # What others found stays, of benchmarks where they were asked alike, and of this step alone.
    monkeypatch.setitem(module.TASKS, "bpb", lambda run, batch: {"tokens": batch})
    report = tmp_path / "evaluation.json"
    planted = dict.fromkeys([*BENCHMARKS, "agreement"], result["arc_easy"])
    report.write_text(json.dumps(result | planted))
    few = dataclasses.replace(DEMO, limit=6, run_model_code=True)
    for step, settings, kept in (
        (7, few, {*BENCHMARKS, "agreement", "combined"}), (7, DEMO, {"agreement"}), (8, few, set()),
    ):  # fmt: skip
        again = dataclasses.replace(run, step=step)
        found = module.evaluate(again, tasks=" bpb, bpb,", settings=settings)
        assert {*found} - ({*result} - {"arc_easy"}) == kept | {"bpb"}
        assert json.loads(report.read_text()) == found
        assert found.get("combined", result["arc_easy"]["score"]) == result["arc_easy"]["score"]


def test_a_loss_that_is_no_number_is_shown_as_nan():
    lost = dict.fromkeys(("cross_entropy", "bits_per_byte"))  # null in the file
    assert [value for _, value in measures({"bpb": lost})] == ["nan", "nan"]


IDS = CHAT.ids


def chain(*ids):
    return dict(zip(ids, ids[1:], strict=False))


def prompt(text):
    return [TOKENIZER.bos, *CHAT.turn(text)]


@pytest.mark.slow
def test_a_call_is_answered_inside_the_answer_and_its_budget():
    """An answer takes no more, whatever the others take."""
    run = calling_run()
    model = language_model(TOKENIZER, (run.config.model, run.params))
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
    prompts = [TOKENIZER.prompt("Answer:"), TOKENIZER.prompt("A longer question, and its Answer:")]
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
    fewer = language_model(TOKENIZER, made).continuations(
        prompts, 6, (), dataclasses.replace(draws, samples=2)
    )
    assert fewer == [row[:2] for row in texts]
    with pytest.raises(LrkvError, match=r"--tokens\) = 512: use 1 to 511"):
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
    allowed = BenchmarkSettings(folder="demo", max_new_tokens=24, run_model_code=True)
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


@pytest.mark.parametrize(
    ("asked", "until", "max_new_tokens", "sampling"),
    [
        ({}, (), 256, Sampling(0.0)),
        ({"until": "\n", "num_beams": 1}, ("\n",), 256, Sampling(0.0)),
        ({"until": 5}, ("5",), 256, Sampling(0.0)),
        ({"until": ["a", "", "b"], "max_gen_toks": 9}, ("a", "b"), 9, Sampling(0.0)),
        ({"until": None, "max_new_tokens": "7"}, (), 7, Sampling(0.0)),
        ({"max_gen_toks": 5, "max_tokens": 6}, (), 5, Sampling(0.0)),
        ({"temperature": 0.5, "top_p": 0.9}, (), 256, Sampling(0.5, 0, 0.9)),
        ({"temperature": 0.5, "do_sample": False}, (), 256, Sampling(0.0)),
        ({"do_sample": True}, (), 256, Sampling(1.0)),
        ({"do_sample": True, "temperature": 1, "top_k": 3}, (), 256, Sampling(1.0, 3)),
    ],
)
def test_settings_of_texts_are_read_as_the_harness_reads_them(
    asked, until, max_new_tokens, sampling
):
    assert GenerationSettings.of(asked, 1024) == GenerationSettings(until, max_new_tokens, sampling)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"num_beams": 10}, "generation_kwargs num_beams: not known here"),
        ({"repetition_penalty": 1.2}, "generation_kwargs repetition_penalty: not known here"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample at temperature = 0"),
        ({"max_gen_toks": 2048}, "reads 1024 tokens, so give --gen_kwargs max_gen_toks=N of 1 to"),
        ({"max_gen_toks": 0}, "max_gen_toks = 0"),
        ({"top_p": 0}, "top_p = 0"),
        ({"max_gen_toks": "1k"}, "generation_kwargs max_gen_toks = 1k: give a number"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_in_a_line(asked, line):
    with pytest.raises(LrkvError, match=line) as refused:
        GenerationSettings.of(asked, 1024)
    assert "\n" not in str(refused.value)


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is ice?"},
    {"role": "assistant", "content": "Water."},
    {"role": "user", "content": "And steam?"},
]


def test_a_chat_travels_as_its_ids_and_a_string_for_logs():
    prompt = ChatPrompt.of(CHAT, HISTORY)
    assert list(prompt.head) == CHAT.prompt(conversation_from(HISTORY)) and prompt.begun == ""
    assert prompt == (
        "<|user_start|>Be brief.\n\nWhat is ice?<|user_end|>"
        "<|assistant_start|>Water.<|assistant_end|>"
        "<|user_start|>And steam?<|user_end|><|assistant_start|>"
    )
    history = [*HISTORY, {"role": "assistant", "content": "It is"}]
    begun = ChatPrompt.of(CHAT, history, answers=False)
    assert (begun.head, begun.begun) == (prompt.head, "It is") and begun == f"{prompt}It is"
    with pytest.raises(LrkvError, match="ends with an answer"):
        ChatPrompt.of(CHAT, history)


def test_a_chat_survives_the_harness_caches():
    prompt = ChatPrompt.of(CHAT, HISTORY)
    for other in (copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):
        assert (other, other.head, other.begun) == (prompt, prompt.head, prompt.begun)


def test_without_the_harness_one_line_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lrkv_jax.evaluation.harness_adapter", raising=False)
    with pytest.raises(LrkvError, match=r'pip install .* "\.\[harness\]"') as told:
        import lrkv_jax.evaluation.harness_adapter  # noqa: F401
    assert "\n" not in str(told.value)
