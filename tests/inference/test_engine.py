"""A request's text is its own, the programs are few, and pages come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.engines import (
    PROMPTS,
    SHARED,
    assert_greedy,
    engine_of,
    program_counts,
    whole_logits,
)
from support.hand_built import a_run
from support.marks import quick
from support.meshes import mesh_of
from support.variants import FIVE, HYBRID, LRKVS, VOCABULARY, error, random_params, small

from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.inference.calls import batched_params
from lrkv_jax.inference.pages import PAGE
from lrkv_jax.inference.request import Request, RngStream, Sequence
from lrkv_jax.inference.sampling import likeliest, sample
from lrkv_jax.models.accounting.serving import serving
from lrkv_jax.models.attention import MLA

LRKV = FIVE["lrkv"]
LINES = {
    **FIVE,
    "lrkv-latent": LRKVS["lrkv-latent-odd_rank"],
    "mla-full": MLA(kv_lora_rank=11, rope="full"),
    "hybrid": LRKVS["lrkv-none-odd_rank"],
}
SAMPLED = Sampling(1.0, 30, 0.95, 0.001, frequency_penalty=0.2, presence_penalty=0.1, bias={7: 1.0})


@pytest.fixture(scope="module")
def engine():
    return engine_of(LRKV, **SHARED)


@pytest.fixture(scope="module")
def text(engine):
    return engine.generate(PROMPTS, 11)


def asked(number):
    """A request's prompt, its new tokens and how it draws; every third begins as another does."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, VOCABULARY, rng.integers(1, 60)).tolist()
    if number % 3 == 0:
        prompt = np.random.default_rng(0).integers(0, VOCABULARY, PAGE + 3).tolist() + prompt
    sampling = SAMPLED if number % 2 else Sampling()
    how = {"sampling": sampling, "rng": RngStream(5, number)}
    return prompt, int(rng.integers(20, 110)), how


SLOW = [
    ("lrkv-latent", "int8"), ("lrkv-latent", "bfloat16"), ("mha", "bfloat16"), ("hybrid", "int8"),
    *((name, "float32") for name in LINES if name != "lrkv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), quick(("lrkv", "float32"), slow=SLOW))
def test_a_text_is_the_same_to_the_bit_alone_and_in_any_batch(name, dtype):
    """Other requests, order, slots, pages, shared prefixes, preemption change nothing."""
    model = {"dtype": dtype}
    if dtype == "int8":
        model = {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    if name == "hybrid":
        model |= {**HYBRID, "window": 40}
    engine = engine_of(LINES[name], model=model, **SHARED)
    alone = []
    for number in range(10):
        prompt, new, how = asked(number)
        request = engine.submit(prompt, new, logprobs=2, **how)
        engine.finish([request])
        alone.append((request.output_ids, request.result.logprobs))
        engine.reset()
    engine.scheduler._expected = 0.0  # it lets in more than will fit
    order = np.random.default_rng(1).permutation(10)
    together: dict[int, Sequence] = {}
    for number in [*order, *order]:
        prompt, new, how = asked(number)
        together.setdefault(int(number), engine.submit(prompt, new, logprobs=2, **how))
        others = engine.submit(prompt[::-1], 9)
        engine.advance()
        engine.cancel(others)
    before = program_counts()
    engine.finish(list(together.values()))
    for number, request in together.items():
        assert (request.output_ids, request.result.logprobs) == alone[number], number
    results = [request.result for request in together.values()]
    assert any(result.preemptions for result in results), "none was preempted"
    assert any(result.cached_tokens for result in results), "none shared a prefix"
    made = np.subtract(program_counts(), before)
    assert made[:3].tolist() == [0, 0, 0], "programs are made before the first request ends"
    while engine.advance():
        pass
    (pool,) = engine.scheduler.pools
    assert pool.free == engine.pages == 8


def test_a_request_has_its_own_rules_and_is_told_what_the_model_thinks(engine, text):
    how = Sampling(frequency_penalty=0.9, presence_penalty=0.4, bias={text[0][0]: -50.0, 3: 1.5})
    ruled = engine.submit(PROMPTS[0], 30, sampling=how, logprobs=3)
    late = engine.submit(PROMPTS[0], 11, stop_token_ids=frozenset(text[0]), min_tokens=6)
    assert engine.generate(PROMPTS[1:], 11) == text[1:]
    engine.finish([ruled, late])

    start = len(PROMPTS[0])
    (logits_TV,) = whole_logits(engine.config, [ruled.tokens])
    for place in range(start, len(ruled.tokens)):
        logits_V = logits_TV[place - 1].astype(np.float64)
        log_p_V = logits_V - np.log(np.exp(logits_V).sum())
        ids = np.argsort(-logits_V)[:3]
        told = ruled.result.logprobs[place]
        assert [i for i, _ in told.tops] == ids.tolist()
        assert error([p for _, p in told.tops], log_p_V[ids]) <= 1e-5
        assert abs(told.log_p - log_p_V[ruled.tokens[place]]) <= 1e-5
        said_V = np.bincount(ruled.tokens[start:place], minlength=VOCABULARY)
        logits_V -= 0.9 * said_V + 0.4 * (said_V > 0)
        logits_V[text[0][0]] -= 50
        logits_V[3] += 1.5
        assert ruled.tokens[place] == logits_V.argmax()
    assert not set(late.tokens[start : start + 6]) & set(text[0])


def test_what_is_drawn_does_not_depend_on_jaxs_default_generator(engine):
    how = {"sampling": Sampling(0.8), "seed": 5}
    drawn = engine.generate(PROMPTS[:1], 12, **how)
    with jax.default_prng_impl("rbg"):
        assert engine_of(LRKV, **SHARED).generate(PROMPTS[:1], 12, **how) == drawn


def test_stop_tokens_end_their_sequence_alone_whole_or_in_a_stream(engine, text):
    for stop in ((text[0][4],), tuple({tokens[5] for tokens in text})):
        cut = [min((t.index(i) for i in stop if i in t), default=len(t)) for t in text]
        expected = [tokens[:end] for tokens, end in zip(text, cut, strict=True)]
        assert engine.generate(PROMPTS, 11, stop=stop) == expected
        pieces = list(engine.stream(PROMPTS, 11, stop=stop))
        assert len(pieces) > 1 and all(any(new) for new in pieces)
        assert [sum((new[row] for new in pieces), []) for row in range(len(text))] == expected
    # More ids than a slot has room for.
    many = [*(token for token in range(VOCABULARY) if token not in text[0]), text[0][4]]
    assert len(many) > 8
    assert engine.generate(PROMPTS[:1], 11, stop=many)[0] == text[0][: text[0].index(many[-1])]


def test_a_text_that_nobody_reads_to_its_end_leaves_nothing(engine, text):
    stream = engine.stream([prompt[::-1] for prompt in PROMPTS], 20)
    next(stream)
    stream.close()
    with pytest.raises(LrkvError):  # one is refused, and the other was submitted before it
        engine.forced_logits([[1], [99]], [[1], [2]])
    before = program_counts()
    assert engine.scheduler.idle
    assert engine.generate(PROMPTS, 11) == text
    assert program_counts() == before


def test_parameters_on_a_mesh_of_one_device_have_the_programs_of_any_others(engine, text):
    before = program_counts()
    place = NamedSharding(mesh_of(), PartitionSpec())
    assert engine_of(LRKV, place=place, **SHARED).generate(PROMPTS, 11) == text
    assert program_counts() == before


def test_requests_go_on_after_whatever_stopped_a_call_half_way(engine, text, monkeypatch):
    requests = [engine.submit(prompt, 11) for prompt in PROMPTS]
    scored = engine.submit(PROMPTS[0], continuations=[[1, 2], [3] * 20])
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
    assert [request.output_ids for request in requests] == text
    assert [len(log_p) for log_p in scored.result.log_p] == [2, 16, 4]
    assert engine.scheduler.recomputed_tokens


def test_a_reset_ends_what_there_was_and_leaves_nothing_of_it(engine, text):
    running, held = (engine.submit(PROMPTS[0], n, retain=True) for n in (30, 2))
    engine.finish([held])
    engine.reset()
    requests = [engine.submit(prompt, 11) for prompt in PROMPTS]
    engine.advance()
    engine.cancel(running)
    with pytest.raises(LrkvError, match="the sequence is ended"):
        engine.append(held, [], 9)
    engine.finish([running, held, *requests])
    assert [request.output_ids for request in requests] == text


def test_a_request_may_fill_its_pages_to_the_last_slot(engine):
    prompts = PROMPTS[:2]
    texts = [engine.generate([prompt], 256 - len(prompt))[0] for prompt in prompts]
    assert [len(p + t) for p, t in zip(prompts, texts, strict=True)] == [256, 256]
    assert_greedy(engine.config, prompts, texts)


def test_the_report_sums_live_buffers(engine):
    report = engine.report()
    # 2 (K + 4 heads of rank 3, padded to 8) float32 values and 4 float32 norms.
    per_token = 2 * (8 + 4 * 8) * 4 + 4 * 4
    assert report.cache_bytes_per_token == per_token
    assert report.cache_bytes_per_token_formula == 2 * (8 + 4 * 3) * 4 + 4 * 4
    # Eight pages, and the page that nobody has.
    assert report.cache_bytes == per_token * PAGE * (8 + 1)


@pytest.mark.parametrize("length", [100, 1000])
@pytest.mark.parametrize("pattern", [None, "SSSG"])
def test_a_plan_s_cache_of_a_sequence_is_what_the_engine_allocates(pattern, length):
    model = {"layers": 4, "layers_pattern": pattern, "window": 70, "dtype": "bfloat16"}
    engine = engine_of(LRKV, model=model, length=length)
    leaves = jax.tree.leaves(engine.calls.cache())
    nbytes = sum(leaf.nbytes // len(leaf) * (len(leaf) - 1) for leaf in leaves)  # no null page
    planned = serving(engine.config, hardware("h200"), length, prefill_chunk=128)
    assert nbytes == len(PROMPTS) * planned.cache_per_sequence


def given(other):
    """An engine that is given another model's parameters."""
    return Engine(small(LRKV), random_params(other), batch=1, length=64)


def run_given(*params, **changes):
    """An engine of a run that is given something else than the run has."""
    run = a_run(small(LRKV), random_params(small(LRKV)))
    return Engine(run, *params, **changes)


def scored(engine):
    sequence = engine.submit([1], continuations=[[2]], retain=True)
    engine.finish([sequence])
    return sequence


REFUSED = [
    (lambda e: e.generate([[1], []], 4), "the prompt is empty"),
    (lambda e: e.generate([[1] * 253], 5), "253 tokens and 5 more do not fit a cache of 256"),
    (lambda e: e.generate([[1], [VOCABULARY]], 4), f"token id {VOCABULARY}, .* 0 to 39"),
    (lambda e: e.generate([[1.5]], 4), "the prompt holds float64 values"),
    (lambda e: e.generate([1, 2], 4), "the prompt is 1: give a list of token ids"),
    (lambda e: e.submit([[1, 2], [3]], 4), "the prompt holds lists of different lengths"),
    (lambda e: e.finish([Sequence(Request([1], 2))]), "a sequence is not of this engine"),
    (lambda e: e.generate([[1]], 4, stop=(99,)), "stop_token_ids has the token id 99"),
    (lambda e: list(e.stream([[1]], 0)), "max_tokens = 0"),
    (lambda e: e.submit([1], 3, min_tokens=4), "min_tokens = 4: use 0 to max_tokens = 3"),
    (lambda e: e.submit([1], 3, forced=[1], min_tokens=2), "min_tokens with forced"),
    (lambda e: e.append(scored(e), [1], 2), "was scored: only one that was continued"),
    (lambda e: e.submit([1], 3, logprobs=99), "logprobs = 99: use 0 to 20"),
    (lambda e: e.submit([1], continuations=[[1], []]), "continuation 1 is empty"),
    (lambda e: e.submit([1], continuations=[[1] * 256]), "1 tokens and 256 more do not fit"),
    (lambda e: e.append(e.submit([1], 3), [1], 2), "sequence is queued: only a retained one"),
    (lambda e: e.forced_logits([[1]], [[1, 99]]), "forced has the token id 99"),
    (lambda e: engine_of(LRKV, prefill_chunk=0), "prefill_chunk = 0: use 1 or more"),
    (lambda e: engine_of(LRKV, pages=1), "a request of 128 tokens needs .* bytes of cache"),
    (lambda e: given(small(FIVE["mha"])), r"key is \(2, 24, 4, 8\), and .* \(2, 24, 8\)"),
    (lambda e: run_given(random_params(small(FIVE["mha"]))), r"key is \(2, 24, 4, 8\)"),
    (lambda e: run_given(length=0), "length = 0: use 1 or more"),
    (lambda e: given(small(LRKV, layers=1)), r"is \(1, .*, and the configuration has \(2, "),
    (lambda e: given(small(LRKV, tied_head=True)), "head.kernel is nothing"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_decoded_is_refused_and_leaves_nothing(engine, call, message):
    with pytest.raises(LrkvError, match=message) as error:
        call(engine)
    assert "\n" not in str(error.value)
    engine.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mha", "mla", "lrkv"])
def test_in_bfloat16_weights_are_read_as_such_and_logits_stay_within_rounding(name):
    model = {"dtype": "bfloat16", "norm_gain": True}
    engine = engine_of(FIVE[name], model=model, mesh=mesh_of())  # a run's, on one device
    # On a CPU all that multiplies a layer's input is one matrix.
    assert len(engine.calls.model.blocks[0].attention.joined) == engine.config.width
    kinds = {leaf.dtype for leaf in jax.tree.leaves(engine.calls.model) if leaf.ndim > 1}
    assert kinds == {jnp.dtype("bfloat16")}
    continuations = [[7, 3, 9, 1]] * len(PROMPTS)
    ours = engine.forced_logits(PROMPTS, continuations)
    rows = [p + more for p, more in zip(PROMPTS, continuations, strict=True)]
    forward = whole_logits(engine.config, rows)
    for prompt, logits, forward_TV in zip(PROMPTS, ours, forward, strict=True):
        assert error(logits, forward_TV[len(prompt) - 1 : -1]) < 2.0**-5


P_V = np.array([0.05, 0.4, 0.02, 0.25, 0.18, 0.1])
DRAWS = 20_000
EVERY = [0, 1, 2, 3, 4, 5]
# How a row draws, the tokens that it keeps, and the power of P_V that it draws them by.
RULES = [
    (Sampling(1.0), EVERY, 1.0),
    (Sampling(0.5), EVERY, 2.0),
    (Sampling(1.0, top_k=2), [1, 3], 1.0),
    (Sampling(1.0, top_p=0.6), [1, 3], 1.0),  # 0.4 is short of 0.6, 0.65 is not
    (Sampling(1.0, top_p=0.7), [1, 3, 4], 1.0),
    (Sampling(1.0, top_p=1e-300), [1], 1.0),  # 0 in float32
    (Sampling(2.0, top_k=4, top_p=0.5), [1, 3], 0.5),
    # The temperature comes before what is cut: of P_V ** 0.5 more tokens make 0.6, or are near.
    (Sampling(2.0, top_p=0.6), [1, 3, 4], 0.5),
    (Sampling(2.0, min_p=0.6), [1, 3, 4], 0.5),
    (Sampling(0.5, top_p=0.55), [1], 2.0),
    (Sampling(1.0, min_p=0.4), [1, 3, 4], 1.0),  # of 0.4
    (Sampling(1.0, top_k=5, min_p=0.3), [1, 3, 4], 1.0),
    # Below 1e-37 a temperature counted as 0, and others were drawn.
    (Sampling(0.0), [1], 1.0),
    (Sampling(1e-38, top_k=3), [1], 1.0),
    (Sampling(5e-324, top_p=0.9), [1], 1.0),
]


def test_each_row_draws_the_tokens_that_it_keeps_in_proportion():
    """All rules in one batch, each over many keys. Of equal logits the first is the likeliest."""
    assert likeliest(jnp.array([[1.0, 3, 3], [jnp.nan] * 3])).tolist()[0] == 1
    ways = [Sequence(Request([1], 2, sampling=how)) for how, _, _ in RULES]
    rows = jnp.repeat(jnp.arange(len(RULES)), DRAWS)
    params = jax.tree.map(lambda of: jnp.asarray(of)[rows] if of.ndim else of, batched_params(ways))
    logits_BV = jnp.broadcast_to(jnp.log(P_V), (len(rows), len(P_V)))
    tokens_B = np.asarray(sample(logits_BV, jax.random.split(jax.random.key(0), len(rows)), params))
    for (how, kept, power), drawn in zip(RULES, tokens_B.reshape(-1, DRAWS), strict=True):
        expected = np.where(np.isin(EVERY, kept), P_V**power, 0)
        expected /= expected.sum()
        # Four standard deviations of a binomial frequency.
        spread = 4 * np.sqrt(expected * (1 - expected) / DRAWS)
        found = np.bincount(drawn, minlength=len(P_V)) / DRAWS
        assert (abs(found - expected) <= spread).all(), how


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.5), ("min_p", -0.1), ("frequency_penalty", float("inf")),
        ("bias", {1: float("nan")}),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(LrkvError, match=name):
        Sampling(**{name: value})
