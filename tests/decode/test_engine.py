"""The engine's text is its sequence's own, its programs are few, and its cache stays in place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import (
    LENGTHS,
    PROMPTS,
    SEED,
    assert_greedy,
    engine_of,
    program_counts,
    whole_logits,
)
from support.variants import FIVE, VOCABULARY, error, random_params, small

from lrkv_jax.decode import Engine, Sampling, generate, programs
from lrkv_jax.errors import LrkvError

LRKV = FIVE["lrkv"]
GREEDY = {"sampling": Sampling(), "stop": ()}


@pytest.fixture(scope="module")
def engine():
    return engine_of(LRKV)


@pytest.fixture(scope="module")
def text(engine):
    return engine.generate(PROMPTS, 11)


@pytest.mark.slow
def test_sampled_text_does_not_depend_on_the_batch_around_it(engine):
    how = {"sampling": Sampling(1.0, top_p=0.9), "seed": 5}
    together = engine.generate(PROMPTS, 10, **how)
    alone = generate(engine.config, random_params(engine.config, SEED), PROMPTS[:1], 10, **how)
    roomy = engine.generate(PROMPTS[:1], 10, **how)
    assert together[0] == alone[0] == roomy[0]
    assert engine.generate(PROMPTS, 10, sampling=how["sampling"], seed=6) != together


def test_a_stop_token_ends_its_sequence_alone_and_is_not_returned(engine, text):
    stop = text[0][4]
    stopped = engine.generate(PROMPTS, 11, stop=(stop,))
    for before, after in zip(text, stopped, strict=True):
        cut = before.index(stop) if stop in before else len(before)
        assert after == before[:cut]


def test_a_stream_ends_with_its_last_sequence(engine, text):
    stop = tuple({tokens[5] for tokens in text})
    ends = [min(tokens.index(t) for t in stop if t in tokens) for tokens in text]
    rows = list(engine.stream(PROMPTS, 11, stop=stop))
    assert len(rows) == max(ends) + 1 <= 6
    for column, tokens, end in zip(np.transpose(rows), text, ends, strict=True):
        assert column.tolist() == tokens[: end + 1] + [-1] * (max(ends) - end)


def test_when_all_have_stopped_the_device_takes_no_further_step(engine):
    session = engine.session()
    session.append(PROMPTS)
    state, *_ = session._begin(None, GREEDY)
    lengths_B = np.asarray(state.lengths_B)
    before = jax.tree.map(np.asarray, state.cache)
    stopped = replace(state, stopped_B=np.ones(len(PROMPTS), bool))
    after, tokens_NB, _ = engine.run(programs.steps, stopped, np.int32(4), None, most=4, **GREEDY)
    assert (np.asarray(tokens_NB) == -1).all()
    np.testing.assert_array_equal(after.lengths_B, lengths_B)
    jax.tree.map(np.testing.assert_array_equal, after.cache, before)


@pytest.mark.slow
def test_programs_are_as_many_for_any_prompt_and_any_text():
    engine = engine_of(FIVE["mqa"], batch=2, length=160, prefill_chunk=64)
    before = program_counts()
    for longest, new in [(1, 2), (32, 1), (33, 3), (64, 4), (65, 5), (97, 9), (128, 17), (140, 20)]:
        engine.generate([[3] * longest, [1, 2]], new)
    made = np.subtract(program_counts(), before)
    # Pieces of 32 and 64 tokens, first or later; one beginning; one program of steps.
    assert made.tolist() == [4, 1, 1]


def test_a_cache_is_used_again_and_its_leftovers_change_nothing(engine, text):
    cache = engine._spare_cache
    stream = engine.stream([prompt[::-1] for prompt in PROMPTS], 20)
    next(stream)
    stream.close()  # a text that nobody reads to its end
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))  # donated
    before = program_counts()
    assert engine._spare_cache is not None
    assert engine.generate(PROMPTS, 11) == text
    assert program_counts() == before


def test_two_streams_at_once_do_not_share_a_cache(engine, text):
    steps = zip(engine.stream(PROMPTS, 11), engine.stream(PROMPTS, 11), strict=True)
    for n, (one, other) in enumerate(steps):
        assert one.tolist() == other.tolist() == [tokens[n] for tokens in text]


def test_a_cache_filled_to_its_last_slot_is_long_enough(engine):
    texts = engine.generate(PROMPTS, 64 - max(LENGTHS))
    assert {len(text) for text in texts} == {64 - max(LENGTHS)}
    assert_greedy(engine.config, PROMPTS, texts)


def test_the_report_sums_live_buffers(engine):
    report = engine.report()
    # 2 (K + 4 heads of rank 3, padded to 8) float32 values and 4 float32 norms.
    per_token = 2 * (8 + 4 * 8) * 4 + 4 * 4
    assert report.cache_bytes_per_token == per_token
    assert report.cache_bytes_per_token_formula == 2 * (8 + 4 * 3) * 4 + 4 * 4
    assert report.cache_bytes == report.cache_bytes_per_device == per_token * 4 * 64
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine._spare_cache)) == report.cache_bytes
    assert (report.decode_kernel, report.mesh, report.heads_split) == ("auto", {}, False)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1] * 60], 5, "60 tokens and 5 new ones do not fit a cache of 64"),
        ([[1]] * 5, 4, "5 prompts for a batch of 4"),
        ([[1], [2, VOCABULARY]], 4, f"prompt 1 has the token id {VOCABULARY}, .* 0 to 39"),
        ([[-1]], 4, "prompt 0 has the token id -1"),
        ([[1.5]], 4, "prompt 0 holds float64 values"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(engine, prompts, new, message):
    with pytest.raises(LrkvError, match=message) as error:
        engine.generate(prompts, new)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate([[1]], 4, stop=(99,)), "stop has the token id 99"),
        (lambda e: list(e.stream([[1]], 0)), "new_tokens = 0"),
        (lambda e: e.forced_logits([[1]], [[1], [2]]), "2 continuations of .1. tokens for 1"),
        (lambda e: e.forced_logits([[1]], [[1, 99]]), "continuation 0 has the token id 99"),
        (lambda e: engine_of(LRKV, prefill_chunk=0), "prefill_chunk = 0: use 1 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(engine, call, message):
    with pytest.raises(LrkvError, match=message) as error:
        call(engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (small(FIVE["mha"]), r"blocks.attention.key is \(2, 24, 4, 8\), and .* \(2, 24, 8\)"),
        (small(LRKV, layers=1), r"is \(1, .*, and the configuration has \(2, "),
        (small(LRKV, tied_head=True), "head.kernel is nothing"),
    ],
)
def test_parameters_of_another_model_are_refused(other, message):
    with pytest.raises(LrkvError, match=message) as error:
        Engine(small(LRKV), random_params(other), batch=1, length=64)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [FIVE["mha"], FIVE["mla"], LRKV],
    ids=["mha", "mla", "lrkv"],
)
def test_in_bfloat16_weights_are_read_as_such_and_logits_stay_within_rounding(attention):
    engine = engine_of(attention, model={"dtype": "bfloat16", "norm_gain": True})
    kinds = {leaf.dtype for leaf in jax.tree.leaves(engine.model) if leaf.ndim > 1}
    assert kinds == {jnp.dtype("bfloat16")}
    continuations = [[7, 3, 9, 1]] * len(PROMPTS)
    ours = engine.forced_logits(PROMPTS, continuations)
    rows = [p + more for p, more in zip(PROMPTS, continuations, strict=True)]
    forward = whole_logits(engine.config, rows)
    for prompt, logits, forward_TV in zip(PROMPTS, ours, forward, strict=True):
        assert error(logits, forward_TV[len(prompt) - 1 : -1]) < 2.0**-5
