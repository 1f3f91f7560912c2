"""One greedy text a model, whichever way it is decoded: the whole-sequence forward's."""

import functools

import jax
import numpy as np
import pytest
from support.engines import PROMPTS, SEED, engine_of
from support.variants import FIVE, LRKVS, error, random_params

from lrkv_jax.config import MLA
from lrkv_jax.model import with_parameters

NEW = 11  # two whole calls of four steps, and one of two
EXACT = 1e-5  # float32, relative to the logits' scale
MODELS = {
    **FIVE,
    "mla": MLA(latent=24, rope_width=8),  # widths that the kernel takes
    "lrkv-rank_0": LRKVS["lrkv-full-rank_0"],
    "lrkv-shared": LRKVS["lrkv-shared-odd_rank"],
    "lrkv-latent": LRKVS["lrkv-latent-odd_rank"],
}
# Implementations of the decode kernels that run here; an interpreted one takes seconds a step.
KERNELS = ("xla", pytest.param("interpret", marks=pytest.mark.slow))


# One for each decode kernel, and for LRKV's cache without made keys; the contract has all.
FAST = ("mha", "mla", "lrkv", "lrkv-latent")


@pytest.fixture(
    params=[n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def attention(request):
    return MODELS[request.param]


@functools.cache
def whole_program(config):
    return jax.jit(with_parameters(config, random_params(config, SEED)))


def whole_logits(config, rows):
    """Logits of each row of tokens, from the forward over all of it; rows are padded at the end."""
    tokens_BT = np.zeros((len(rows), 64), np.int32)
    for row, tokens in zip(tokens_BT, rows, strict=True):
        row[: len(tokens)] = tokens
    logits_BTV = np.asarray(whole_program(config)(tokens_BT))
    return [logits_TV[: len(row)] for logits_TV, row in zip(logits_BTV, rows, strict=True)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_greedy_text_is_the_forwards_in_a_ragged_batch_from_a_prefill_in_pieces(attention, kernel):
    engine = engine_of(attention, model={"decode_kernel": kernel})
    texts = engine.generate(PROMPTS, NEW)
    logits = whole_logits(engine.config, [p + t for p, t in zip(PROMPTS, texts, strict=True)])
    for prompt, text, logits_TV in zip(PROMPTS, texts, logits, strict=True):
        # Position t of the forward over prompt + text must choose token t + 1.
        assert text == logits_TV.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert len({tuple(text) for text in texts}) == len(texts), "the prompts made no difference"
    assert min(len(set(text)) for text in texts) > 1


def test_a_prefill_in_pieces_gives_the_whole_prefills_logits_and_the_forwards(attention):
    first = [[0]] * len(PROMPTS)  # the prefill's logits choose the first token
    engine = engine_of(attention, model={"decode_kernel": "xla"})
    pieces_BV = engine.forced_logits(PROMPTS, first)[:, 0]
    engine.prefill_chunk = 64
    whole_BV = engine.forced_logits(PROMPTS, first)[:, 0]
    forward_BV = np.stack([logits_TV[-1] for logits_TV in whole_logits(engine.config, PROMPTS)])
    assert error(whole_BV, forward_BV) <= EXACT
    assert error(pieces_BV, forward_BV) <= EXACT
    assert np.ptp(forward_BV) > 1


def test_forced_logits_are_the_forwards_over_the_given_text():
    engine = engine_of(FIVE["lrkv"], model={"layers": 2})
    continuations = [[(7 * i + row) % 40 for i in range(6)] for row in range(3)]
    logits_BNV = engine.forced_logits(PROMPTS[:3], continuations)
    rows = [p + c for p, c in zip(PROMPTS[:3], continuations, strict=True)]
    for prompt, ours, forward in zip(
        PROMPTS[:3], logits_BNV, whole_logits(engine.config, rows), strict=True
    ):
        assert error(ours, forward[len(prompt) - 1 : -1]) <= EXACT
