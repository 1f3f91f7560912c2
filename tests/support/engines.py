"""Ragged prompts and small engines that the tests of decoding share."""

import functools

import jax
import numpy as np
from support.variants import random_params, random_tokens, small

from lrkv_jax.inference import Engine, programs
from lrkv_jax.models.transformer import with_parameters

# In pages of 64: one and a half, less than one, more than one, less than one.
LENGTHS = (97, 5, 66, 18)
PROMPTS = [random_tokens(n, seed=n).tolist() for n in LENGTHS]


SEED = 3  # greedy text of these weights does not stick to one token
# Of an engine that tests of several files share, so that its programs are compiled once.
SHARED = {"length": 256, "pages": 8}


def engine_of(attention, *, model=None, place=None, **changes):
    """An engine around a random model of one layer, for a batch as large as PROMPTS.

    It reads 128 tokens of prompts at a time, of one or of two.
    """
    config = small(attention, **{"layers": 1, **(model or {})})
    settings = {"batch": len(PROMPTS), "length": 128, "prefill_chunk": 128, "steps_per_call": 4}
    params = jax.device_put(random_params(config, SEED), place)
    return Engine(config, params, **{**settings, **changes})


def program_counts():
    """Programs compiled so far, by name."""
    every = ("prefill", "first_token", "decode", "score", "swap_out", "swap_in")
    return [getattr(programs, name)._cache_size() for name in every]


@functools.cache
def _whole(config):
    return with_parameters(config, random_params(config, SEED))


# Weights are arguments: XLA would spend its time folding constants.
_forward = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def whole_logits(config, rows, length=256):
    """Logits of each row of tokens, from the forward over all of it; rows are padded at the end."""
    count = len(rows) if length > 256 else max(len(rows), len(PROMPTS))
    tokens_BT = np.zeros((count, length), np.int32)
    for row, tokens in zip(tokens_BT, rows, strict=False):
        row[: len(tokens)] = tokens
    logits_BTV = np.asarray(_forward(_whole(config), tokens_BT))[: len(rows)]
    return [logits_TV[: len(row)] for logits_TV, row in zip(logits_BTV, rows, strict=True)]


def assert_greedy(config, prompts, texts):
    """Position t of the forward over prompt + text chooses token t + 1."""
    rows = [p + t for p, t in zip(prompts, texts, strict=True)]
    for prompt, text, logits_TV in zip(prompts, texts, whole_logits(config, rows), strict=True):
        assert text == logits_TV.argmax(-1)[len(prompt) - 1 : -1].tolist()
