"""One greedy text a model, whichever way it is decoded: the whole-sequence forward's."""

import jax
import numpy as np
import pytest
from support.engines import PROMPTS, SHARED, assert_greedy, engine_of, whole_logits
from support.marks import quick
from support.variants import FIVE, HYBRID, LRKVS, error, random_tokens

from lrkv_jax.inference.pages import PAGE
from lrkv_jax.models.attention import MLA

EXACT = 1e-5  # float32, relative to the logits' scale
MODELS = {
    "mha": FIVE["mha"],
    "mla": MLA(kv_lora_rank=24, qk_rope_head_dim=8),  # widths that the kernel takes
    "lrkv": FIVE["lrkv"],
    "lrkv-shared": LRKVS["lrkv-shared-odd_rank"],
    "lrkv-latent": LRKVS["lrkv-latent-odd_rank"],
}
CONTINUATIONS = [[(7 * i + row) % 40 for i in range(6)] for row in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("name", "layers"),
    quick(slow=[*((name, 1) for name in MODELS), ("lrkv", 2)]),
)
def test_texts_and_logits_are_the_forwards_whatever_is_read_beside(name, layers):
    """Ragged prompts, read in chunks and decoded in calls of which the last is not whole."""
    engine = engine_of(MODELS[name], model={"layers": layers}, **SHARED)
    check_greedy(engine, 11)
    together_BNV = engine.forced_logits(PROMPTS, np.array(CONTINUATIONS))
    rows = [p + c for p, c in zip(PROMPTS, CONTINUATIONS, strict=True)]
    forward = whole_logits(engine.config, rows)
    for prompt, more, logits_NV, forward_TV in zip(
        PROMPTS, CONTINUATIONS, together_BNV, forward, strict=True
    ):
        assert error(logits_NV, forward_TV[len(prompt) - 1 : -1]) <= EXACT
        assert np.ptp(forward_TV) > 1
        engine.reset()  # or its pages would be found
        np.testing.assert_array_equal(engine.forced_logits([prompt], [more])[0], logits_NV)


@pytest.mark.slow
def test_windows_decode_as_the_forward_at_32768_positions_and_their_old_pages_are_free():
    """Of layers with a window a text of 512 pages holds those that its next token sees."""
    model = HYBRID | {"layers": 2, "heads": 2, "window": 300}
    entry, length = LRKVS["lrkv-none-odd_rank"], 512 * PAGE
    engine = engine_of(entry, model=model, batch=1, length=length, prefill_chunk=1024)
    tokens = random_tokens(length).tolist()
    prompt, more = tokens[:-40], tokens[-40:]
    request = engine.submit(prompt, len(more), forced=more, retain=True)
    pool, held = engine.scheduler.pools[0], []
    while not request.done:
        engine.advance()
        held.append(len(request.pages) - request.out_of_window)
    # Pages of a window, and of 1,024 tokens that are read at once; and the null page.
    assert max(held) <= 22 and held[-1] == 5
    assert [len(jax.tree.leaves(cache)[0]) for cache in engine.calls.cache()] == [23, 513]
    assert len(request.pages) == 512 and pool.free == engine.pages - 512
    truth_TV = whole_logits(engine.config, [tokens], length)[0]
    assert error(request.result.logits, truth_TV[-41:-1]) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "lrkv"])
def test_greedy_text_is_the_forwards_by_an_interpreted_kernel(name):
    model = {"decode_kernel": "interpret"}
    check_greedy(engine_of(MODELS[name], model=model, steps_per_call=2), 4)


def check_greedy(engine, new):
    texts = engine.generate(PROMPTS, new)
    assert_greedy(engine.config, PROMPTS, texts)
    assert len({tuple(text) for text in texts}) == len(texts), "the prompts made no difference"
    assert min(len(set(text)) for text in texts) > 1
