"""The engine writes what the whole-sequence forward would, alone or in a crowd, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.config import GQA, LRKV, MHA, MLA, MQA, ModelConfig
from lrkv_jax.decode import Engine, Sampling, generate
from lrkv_jax.decode import engine as engine_module
from lrkv_jax.errors import LrkvError
from lrkv_jax.model import init_parameters, with_parameters

V = 61
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
VARIANTS = {
    "mha": MHA(),
    "gqa": GQA(kv_heads=2),
    "mqa": MQA(),
    "mla": MLA(latent=12, rope_width=4),
    "lrkv-full": LRKV(rank=3),
    "lrkv-shared": LRKV(rank=3, rope="shared"),
    "lrkv-latent": LRKV(rank=3, rope="latent"),
}


def model_of(attention):
    """A small model with no weight at its special initial value, so that attention matters."""
    config = ModelConfig(
        layers=2, width=32, heads=4, head_width=8, vocabulary=V, attention=attention
    )
    params = init_parameters(config, 0)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [
        p + 0.4 * jax.random.normal(k, p.shape) / np.sqrt(p.shape[-2])
        for p, k in zip(leaves, keys, strict=True)
    ]
    return config, tree.unflatten(noise)


@pytest.fixture(scope="module")
def lrkv():
    return model_of(LRKV(rank=3))


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_text_is_the_argmax_of_the_whole_sequence_forward(name):
    config, params = model_of(VARIANTS[name])
    texts = generate(config, params, PROMPTS, 12)
    model = with_parameters(config, params)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        # Position t of the forward over prompt + text must choose token t + 1.
        logits_TV = model(jnp.array([prompt + text]))[0]
        expected = np.asarray(logits_TV.argmax(-1))[len(prompt) - 1 : -1]
        assert text == expected.tolist()
    assert len({tuple(text) for text in texts}) == len(texts), "the prompts made no difference"


def test_sampled_text_does_not_depend_on_the_batch_around_it(lrkv):
    how = {"sampling": Sampling(1.0, top_p=0.9), "seed": 5}
    together = generate(*lrkv, PROMPTS, 10, **how)
    alone = generate(*lrkv, PROMPTS[:1], 10, **how)
    roomy = Engine(*lrkv, batch=5, length=128).generate(PROMPTS[:1], 10, **how)
    assert together[0] == alone[0] == roomy[0]
    assert generate(*lrkv, PROMPTS, 10, sampling=how["sampling"], seed=6) != together


def test_a_stop_token_ends_its_sequence_alone_and_is_not_returned(lrkv):
    free = generate(*lrkv, PROMPTS, 12)
    stop = free[0][4]
    stopped = generate(*lrkv, PROMPTS, 12, stop=(stop,))
    for before, after in zip(free, stopped, strict=True):
        cut = before.index(stop) if stop in before else len(before)
        assert after == before[:cut]


def test_a_long_generation_compiles_one_step_and_reuses_its_cache(lrkv):
    engine = Engine(*lrkv, batch=3, length=96)
    before = engine_module._step._cache_size()
    first = engine.generate(PROMPTS, 40)
    assert engine_module._step._cache_size() == before + 1
    cache = engine.init_cache()
    engine._spare_cache = cache
    second = engine.generate(PROMPTS, 40)
    assert engine_module._step._cache_size() == before + 1
    # The first call's leftovers are in the buffers, which were donated, and change nothing.
    assert second == first
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_the_step_writes_its_cache_in_place(lrkv):
    engine = Engine(*lrkv, batch=3, length=96)
    state, _ = engine._start(PROMPTS, 8, Sampling(), 0, ())
    arguments = (engine._graph, engine._weights, state, Sampling(), ())
    memory = engine_module._step.lower(*arguments).compile().memory_analysis()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    assert memory.alias_size_in_bytes >= cache_bytes


def test_live_cache_bytes_are_the_formula(lrkv):
    config, params = lrkv
    per_layer = 2 * (8 + 4 * 3) * 4 + 4 * 4  # 2 (K + H R) float32 values, H float32 norms
    assert Engine(config, params, batch=2, length=64).cache_bytes_per_token() == 2 * per_layer


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1] * 60], 5, "do not fit a cache of 64"),
        ([[1]] * 3, 4, "3 prompts for a batch of 2"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(lrkv, prompts, new, message):
    with pytest.raises(LrkvError, match=message) as error:
        Engine(*lrkv, batch=2, length=64).generate(prompts, new)
    assert "\n" not in str(error.value)
