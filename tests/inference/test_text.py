"""One greedy text a model, whichever way it is decoded: the whole-sequence forward's."""

import numpy as np
import pytest
from support.engines import PROMPTS, assert_greedy, engine_of, whole_logits
from support.variants import FIVE, LRKVS, error

from lrkv_jax.models.attention import MLA

# Tokens, and steps of a call: two whole calls and one of two steps; one whole and one of one.
NEW = {"xla": (11, 4), "interpret": (4, 2)}
EXACT = 1e-5  # float32, relative to the logits' scale
MODELS = {
    "mha": FIVE["mha"],
    "mla": MLA(kv_lora_rank=24, qk_rope_head_dim=8),  # widths that the kernel takes
    "lrkv": FIVE["lrkv"],
    "lrkv-shared": LRKVS["lrkv-shared-odd_rank"],
    "lrkv-latent": LRKVS["lrkv-latent-odd_rank"],
}

# One for each decode kernel; the contract has all.
FAST = ("mha", "mla", "lrkv")


@pytest.fixture(
    params=[n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def attention(request):
    return MODELS[request.param]


def test_greedy_text_is_the_forwards_in_a_ragged_batch_from_a_prefill_in_pieces(attention):
    check_greedy(attention, "xla")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "lrkv"])
def test_greedy_text_is_the_forwards_by_an_interpreted_kernel(name):
    check_greedy(MODELS[name], "interpret")


def check_greedy(attention, kernel):
    new, steps = NEW[kernel]
    engine = engine_of(attention, model={"decode_kernel": kernel}, steps_per_call=steps)
    texts = engine.generate(PROMPTS, new)
    assert_greedy(engine.config, PROMPTS, texts)
    assert len({tuple(text) for text in texts}) == len(texts), "the prompts made no difference"
    assert min(len(set(text)) for text in texts) > 1


def test_prompts_have_the_forwards_logits_and_the_same_bits_whatever_is_read_beside(attention):
    first = [[0]] * len(PROMPTS)  # the prompt's own logits choose the first token
    engine = engine_of(attention, model={"decode_kernel": "xla"})
    together_BV = engine.forced_logits(PROMPTS, first)[:, 0]
    forward_BV = np.stack([logits_TV[-1] for logits_TV in whole_logits(engine.config, PROMPTS)])
    assert error(together_BV, forward_BV) <= EXACT
    assert np.ptp(forward_BV) > 1
    for prompt, logits_V in zip(PROMPTS, together_BV, strict=True):
        engine.reset()  # or its pages would be found
        np.testing.assert_array_equal(engine.forced_logits([prompt], [[0]])[0, 0], logits_V)


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_forced_logits_are_the_forwards_over_the_given_text(layers):
    engine = engine_of(FIVE["lrkv"], model={"layers": layers, "decode_kernel": "xla"})
    continuations = [[(7 * i + row) % 40 for i in range(6)] for row in range(3)]
    logits_BNV = engine.forced_logits(PROMPTS[:3], continuations)
    rows = [p + c for p, c in zip(PROMPTS[:3], continuations, strict=True)]
    for prompt, ours, forward in zip(
        PROMPTS[:3], logits_BNV, whole_logits(engine.config, rows), strict=True
    ):
        assert error(ours, forward[len(prompt) - 1 : -1]) <= EXACT
