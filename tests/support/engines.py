"""Ragged prompts and small engines that the tests of decoding share."""

from support.variants import random_params, random_tokens, small

from lrkv_jax.decode import Engine, programs

# In pieces of 16: two and a third that is padded, less than one, more than one, less than one.
LENGTHS = (37, 5, 18, 9)
PROMPTS = [random_tokens(n, seed=n).tolist() for n in LENGTHS]


SEED = 3  # greedy text of these weights does not stick to one token


def engine_of(attention, *, model=None, **changes):
    """An engine around a random model of one layer, for a batch as large as PROMPTS."""
    config = small(attention, **{"layers": 1, **(model or {})})
    settings = {"batch": len(PROMPTS), "length": 64, "prefill_chunk": 16, "steps_per_call": 4}
    return Engine(config, random_params(config, SEED), **{**settings, **changes})


def program_counts():
    """Programs compiled so far: of `fill`, `begin` and `steps`."""
    return [p._cache_size() for p in (programs.fill, programs.begin, programs.steps)]
