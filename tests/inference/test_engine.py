"""A request's text is its own, the programs are few, and pages come back."""

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
from support.variants import FIVE, LRKVS, VOCABULARY, error, random_params, small

from lrkv_jax.config import MLA
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine, Sampling, generate, programs
from lrkv_jax.inference.pages import PAGE
from lrkv_jax.inference.request import Draw, Request
from lrkv_jax.inference.schedule import Plan

LRKV = FIVE["lrkv"]
LINES = {
    **FIVE,
    "lrkv-latent": LRKVS["lrkv-latent-odd_rank"],
    "mla-full": MLA(latent=11, rope="full"),
}
SAMPLED = Sampling(1.0, 30, 0.95, 0.001, frequency_penalty=0.2, presence_penalty=0.1, bias={7: 1.0})


@pytest.fixture(scope="module")
def engine():
    return engine_of(LRKV)


@pytest.fixture(scope="module")
def text(engine):
    return engine.generate(PROMPTS, 11)


def asked(number):
    """A request's prompt, its new tokens and how it draws; every third begins as another does.

    Every third one repeats itself, and so does its text.
    """
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, VOCABULARY, rng.integers(1, 60)).tolist()
    if number % 3 == 0:
        prompt = np.random.default_rng(0).integers(0, VOCABULARY, PAGE + 3).tolist() + prompt
    sampling = SAMPLED if number % 2 else Sampling()
    if number % 3 == 1:
        prompt = 2 * prompt
    return prompt, int(rng.integers(20, 110)), Draw(sampling, 5, number)


@pytest.mark.parametrize(
    ("name", "dtype", "drafts"),
    [
        ("lrkv-latent", "float32", 7),
        pytest.param("lrkv-latent", "int8", 0, marks=pytest.mark.slow),
        pytest.param("lrkv-latent", "bfloat16", 3, marks=pytest.mark.slow),
        *(
            pytest.param(n, "float32", 7 * (n in ("mha", "mla")), marks=pytest.mark.slow)
            for n in LINES
            if n != "lrkv-latent"
        ),
        pytest.param("mha", "bfloat16", 0, marks=pytest.mark.slow),
    ],
)
def test_a_text_is_the_same_to_the_bit_alone_and_in_any_crowd(name, dtype, drafts):
    """Neighbours, order, rows, pages, prefixes that are found, and giving way change nothing.

    What is looked up changes no token either.
    """
    model = {"dtype": dtype}
    if dtype == "int8":
        model = {"dtype": "bfloat16", "decode_cache": "int8"}
    engine = engine_of(LINES[name], model=model, length=256, pages=5, drafts=drafts)
    alone = []
    for number in range(10):
        prompt, new, draw = asked(number)
        request = engine.submit(prompt, new, draw=draw, tell=2)
        engine.finish([request])
        alone.append((request.said, request.told))
        engine.reset()
    if drafts:
        assert engine.calls.accepted > 10, "no draft was right"
    if drafts and dtype == "float32":
        plain = engine_of(LINES[name], model=model, length=256, pages=5)
        requests = [plain.submit(p, new, draw=draw) for p, new, draw in map(asked, range(10))]
        plain.finish(requests)
        assert [request.said for request in requests] == [text for text, _ in alone]
        assert plain.calls.drafted == 0
    engine.scheduler._expected = 0.0  # it lets in more than will fit
    order = np.random.default_rng(1).permutation(10)
    crowd: dict[int, Request] = {}
    for number in [*order, *order]:
        prompt, new, draw = asked(number)
        crowd.setdefault(int(number), engine.submit(prompt, new, draw=draw, tell=2))
        others = engine.submit(prompt[::-1], 9)
        engine.advance()
        engine.cancel(others)
    before = program_counts()
    engine.finish(list(crowd.values()))
    for number, request in crowd.items():
        assert (request.said, request.told) == alone[number], number
    assert any(request.preempted for request in crowd.values()), "none gave way"
    assert any(request.from_prefix for request in crowd.values()), "none found a prefix"
    made = np.subtract(program_counts(), before)
    assert made[:3].tolist() == [0, 0, 0], "programs are made before the first request ends"
    while engine.advance():
        pass
    (pool,) = engine.scheduler.pools
    assert pool.free == engine.pages == 5


def test_a_request_has_its_own_rules_and_is_told_what_the_model_thinks(engine, text):
    how = Sampling(frequency_penalty=0.9, presence_penalty=0.4, bias={text[0][0]: -50.0, 3: 1.5})
    ruled = engine.submit(PROMPTS[0], 30, draw=Draw(how), tell=3)
    late = engine.submit(PROMPTS[0], 11, stops=frozenset(text[0]), least=6)
    assert engine.generate(PROMPTS[1:], 11) == text[1:]
    engine.finish([ruled, late])

    start = len(PROMPTS[0])
    (logits_TV,) = whole_logits(engine.config, [ruled.tokens])
    for place in range(start, len(ruled.tokens)):
        logits_V = logits_TV[place - 1].astype(np.float64)
        log_p_V = logits_V - np.log(np.exp(logits_V).sum())
        ids = np.argsort(-logits_V)[:3]
        told = ruled.told[place]
        assert [i for i, _ in told.tops] == ids.tolist()
        assert error([p for _, p in told.tops], log_p_V[ids]) <= 1e-5
        assert abs(told.log_p - log_p_V[ruled.tokens[place]]) <= 1e-5
        said_V = np.bincount(ruled.tokens[start:place], minlength=VOCABULARY)
        logits_V -= 0.9 * said_V + 0.4 * (said_V > 0)
        logits_V[text[0][0]] -= 50
        logits_V[3] += 1.5
        assert ruled.tokens[place] == logits_V.argmax()
    assert not set(late.tokens[start : start + 6]) & set(text[0])


def test_a_stop_token_ends_its_sequence_alone_and_is_not_returned(engine, text):
    stop = text[0][4]
    stopped = engine.generate(PROMPTS, 11, stop=(stop,))
    for before, after in zip(text, stopped, strict=True):
        cut = before.index(stop) if stop in before else len(before)
        assert after == before[:cut]


def test_more_ids_than_a_row_has_room_for_stop_it_too(engine, text):
    unsaid = [token for token in range(VOCABULARY) if token not in text[0]]
    stop = (*unsaid, text[0][4])
    assert len(stop) > 8
    assert engine.generate(PROMPTS[:1], 11, stop=stop)[0] == text[0][: text[0].index(stop[-1])]


def test_a_stream_is_the_text_in_pieces_and_ends_with_its_last_sequence(engine, text):
    stop = tuple({tokens[5] for tokens in text})
    pieces = list(engine.stream(PROMPTS, 11, stop=stop))
    assert len(pieces) > 1 and all(any(new) for new in pieces)
    for row, tokens in enumerate(text):
        end = min(tokens.index(token) for token in stop if token in tokens)
        assert sum((new[row] for new in pieces), []) == tokens[:end]


def test_when_all_have_stopped_the_device_takes_no_further_step(engine):
    pool = engine.calls.cache()
    rows = programs.Rows.none(engine.batch, engine.config.vocabulary, 0)
    before = jax.tree.map(np.asarray, pool)
    engine.calls.pool, after, taken = engine.calls.run(
        programs.steps, pool, rows, engine.calls.given(Plan()), np.int32(4), np.False_, None, most=4
    )
    assert not taken.count_B.any() and not after.length_B.any()
    jax.tree.map(np.testing.assert_array_equal, engine.calls.pool, before)


@pytest.mark.slow
def test_programs_are_as_many_for_any_requests():
    engine = engine_of(FIVE["mqa"], batch=2, length=192)
    before = program_counts()
    sizes = [(1, 2), (32, 1), (33, 3), (64, 4), (65, 5), (97, 9), (128, 17), (140, 20)]
    for longest, new in sizes:
        how = {"sampling": SAMPLED if new % 2 else Sampling(), "stop": [1, 2, 3][: new % 4]}
        engine.generate([[3] * longest, [1, 2], [5]], new, **how)
    made = np.subtract(program_counts(), before)
    assert made.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_text_that_nobody_reads_to_its_end_leaves_nothing(engine, text):
    stream = engine.stream([prompt[::-1] for prompt in PROMPTS], 20)
    next(stream)
    stream.close()
    before = program_counts()
    assert engine.scheduler.idle
    assert engine.generate(PROMPTS, 11) == text
    assert program_counts() == before


def test_requests_go_on_after_whatever_stopped_a_call_half_way(engine, text, monkeypatch):
    requests = [engine.submit(prompt, 11) for prompt in PROMPTS]
    scored = engine.submit(PROMPTS[0], choices=[[1, 2], [3] * 20])
    run, calls = engine.calls.run, []

    def stopped(program, *arguments, **static):
        calls.append(program)
        if len(calls) in (3, 9):
            raise KeyboardInterrupt
        return run(program, *arguments, **static)

    monkeypatch.setattr(engine.calls, "run", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.finish([*requests, scored])
    engine.finish([*requests, scored])
    assert [request.said for request in requests] == text
    assert [len(log_p) for log_p in scored.log_p] == [2, 16, 4]
    assert engine.scheduler.read_again


def test_two_streams_at_once_do_not_disturb_each_other(engine, text):
    one, other = [[] for _ in PROMPTS], [[] for _ in PROMPTS]
    streams = engine.stream(PROMPTS, 11), engine.stream(PROMPTS[::-1], 11)
    for texts, stream in ((one, streams[0]), (other, streams[1]), (one, streams[0])):
        for said, new in zip(texts, next(stream), strict=True):
            said += new
    for texts, stream in zip((one, other), streams, strict=True):
        for pieces in stream:
            for said, new in zip(texts, pieces, strict=True):
                said += new
    assert one == text and other == text[::-1]


def test_a_request_may_fill_its_pages_to_the_last_slot(engine):
    texts = engine.generate(PROMPTS, 128 - max(LENGTHS))
    assert {len(text) for text in texts} == {128 - max(LENGTHS)}
    assert_greedy(engine.config, PROMPTS, texts)


def test_the_report_sums_live_buffers(engine):
    report = engine.report()
    # 2 (K + 4 heads of rank 3, padded to 8) float32 values and 4 float32 norms.
    per_token = 2 * (8 + 4 * 8) * 4 + 4 * 4
    assert report.cache_bytes_per_token == per_token
    assert report.cache_bytes_per_token_formula == 2 * (8 + 4 * 3) * 4 + 4 * 4
    # Four requests of two pages, and the page that nobody has.
    assert report.cache_bytes == report.cache_bytes_per_device == per_token * PAGE * (4 * 2 + 1)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine.calls.cache())) == report.cache_bytes
    assert (report.decode_kernel, report.mesh, report.heads_split) == ("auto", {}, False)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1], []], 4, "the prompt is empty"),
        ([[1] * 125], 5, "125 tokens and 5 more do not fit a cache of 128"),
        ([[1], [2, VOCABULARY]], 4, f"the prompt has the token id {VOCABULARY}, .* 0 to 39"),
        ([[-1]], 4, "the prompt has the token id -1"),
        ([[1.5]], 4, "the prompt holds float64 values"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(engine, prompts, new, message):
    with pytest.raises(LrkvError, match=message) as error:
        engine.generate(prompts, new)
    assert "\n" not in str(error.value)
    assert engine.scheduler.idle, "those before the refused one are not left behind"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate([[1]], 4, stop=(99,)), "stop has the token id 99"),
        (lambda e: list(e.stream([[1]], 0)), "new_tokens = 0"),
        (lambda e: e.forced_logits([[1]], [[1], [2]]), "2 continuations of .1. tokens for 1"),
        (lambda e: e.forced_logits([[1]], [[1, 99]]), "continuation 0 has the token id 99"),
        (lambda e: engine_of(LRKV, prefill_chunk=0), "prefill_chunk = 0: use 1 or more"),
        (
            lambda e: engine_of(LRKV, pages=1),
            "a request of 128 tokens needs .* bytes of cache, 3 pages",
        ),
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
    kinds = {leaf.dtype for leaf in jax.tree.leaves(engine.calls.model) if leaf.ndim > 1}
    assert kinds == {jnp.dtype("bfloat16")}
    continuations = [[7, 3, 9, 1]] * len(PROMPTS)
    ours = engine.forced_logits(PROMPTS, continuations)
    rows = [p + more for p, more in zip(PROMPTS, continuations, strict=True)]
    forward = whole_logits(engine.config, rows)
    for prompt, logits, forward_TV in zip(PROMPTS, ours, forward, strict=True):
        assert error(logits, forward_TV[len(prompt) - 1 : -1]) < 2.0**-5


def test_one_call_decodes_prompts_together(text):
    config = small(LRKV, layers=1)
    assert generate(config, random_params(config, SEED), PROMPTS, 11) == text
