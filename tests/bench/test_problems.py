"""What is measured: the bytes that must move, the lengths, and answers that agree by two routes."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.bench import gate
from lrkv_jax.bench.implementations import IMPLEMENTATIONS
from lrkv_jax.bench.problems import (
    bytes_to_move,
    cache_nbytes,
    lengths_of,
    make_problem,
    materialised,
    with_kernel,
)
from lrkv_jax.config import GQA, LRKV, MHA, MLA, MQA, ModelConfig

MODES = ("full", "shared", "latent")
ENTRIES = {
    "mha": MHA(),
    "gqa": GQA(kv_heads=2),
    "mqa": MQA(),
    "mla": MLA(latent=12, rope_width=4),
    "mla-no_rope": MLA(latent=12, rope_width=0),
    **{f"lrkv-{mode}": LRKV(rank=3, rope=mode) for mode in MODES},
    "lrkv-rank_0": LRKV(rank=0),
}


def model_of(name, **changes):
    shape = {"layers": 2, "width": 24, "heads": 4, "head_width": 8, "vocabulary": 40}
    return ModelConfig(**{**shape, "attention": ENTRIES[name], **changes})


@functools.cache
def problem_of(name, lengths=(5, 9), slots=9, dtype="float32", **changes):
    """Made once for all tests: nothing in a problem changes."""
    return make_problem(model_of(name, **changes), np.array(lengths, np.int32), slots, dtype, 0)


@functools.cache
def truth_of(name):
    return gate.truth_of(problem_of(name))


@pytest.mark.parametrize(
    ("name", "values", "scalars"),
    [
        ("mha", 2 * 4 * 8, 0),
        ("gqa", 2 * 2 * 8, 0),
        ("mqa", 2 * 8, 0),
        ("mla", 12 + 4, 0),
        # Shared key and value, and 4 heads' latents of 3 in rows of 8; a float32 norm a head.
        ("lrkv-full", 2 * 8 + 2 * 4 * 8, 4),
        ("lrkv-rank_0", 2 * 8, 1),
    ],
)
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_to_move_are_the_hand_count(name, values, scalars, dtype, itemsize):
    """Tokens in the cache times a token's bytes; slots that hold none are not read."""
    problem = problem_of(name, lengths=(5, 1, 9), slots=16, dtype=dtype)
    a_token = values * itemsize + 4 * scalars
    assert problem.bytes_to_move == (5 + 1 + 9) * a_token
    assert bytes_to_move(problem.cache, np.array([16, 16, 16])) == 3 * 16 * a_token
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.cache))
    assert live == 3 * 16 * a_token == cache_nbytes(problem.model, 3, 16, dtype)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_ragged_lengths_come_from_the_seed_and_are_half_full(batch):
    draws = [lengths_of(batch, 1000, ragged=True, seed=seed) for seed in range(20)]
    np.testing.assert_array_equal(draws[3], lengths_of(batch, 1000, ragged=True, seed=3))
    for lengths_B in draws:
        assert lengths_B.shape == (batch,) and lengths_B.dtype == np.int32
        assert 1 <= lengths_B.min() and lengths_B.max() <= 1000
        assert abs(lengths_B.mean() - 500) <= 1
    if batch > 1:
        assert len({tuple(draw) for draw in draws}) == 20
        assert np.ptp(np.concatenate(draws)) > 700
    np.testing.assert_array_equal(lengths_of(batch, 7, ragged=False, seed=0), [7] * batch)
    assert lengths_of(4, 1, ragged=True, seed=0).tolist() == [1] * 4


@pytest.mark.parametrize("name", ENTRIES)
def test_rebuilding_keys_and_values_gives_what_the_factored_cache_gives(name):
    """Three routes to one answer: the kernel, the oracle, and whole keys attended to in numpy."""
    problem, truth = problem_of(name), truth_of(name)
    arrays = (problem.queries, problem.factors, problem.cache, problem.lengths_B)
    kernel = jax.jit(functools.partial(with_kernel, problem, impl="xla"))
    assert gate.error(truth, *kernel(*arrays)) < 1e-5
    if problem.kind == "grouped":
        cache = problem.cache
        repeats = 4 // cache.k_BSGK.shape[2]
        whole = [problem.queries["q_BTHK"], *(
            np.repeat(a, repeats, axis=2) for a in (cache.k_BSGK, cache.v_BSGK)
        )]  # fmt: skip
    else:
        whole = jax.jit(functools.partial(materialised, problem))(*arrays)
    q_BTHX, k_BSHX, v_BSHK = (np.asarray(a, np.float64) for a in whole)
    for row, length in enumerate(np.asarray(problem.lengths_B)):
        logits_HS = np.einsum("hx,shx->hs", q_BTHX[row, 0], k_BSHX[row, :length]) * problem.scale
        assert 0.3 < logits_HS.std() < 3  # neither flat nor one-hot: a wrong logit shows
        weights_HS = np.exp(logits_HS - logits_HS.max(axis=1, keepdims=True))
        weights_HS /= weights_HS.sum(axis=1, keepdims=True)
        expected = np.einsum("hs,shk->hk", weights_HS, v_BSHK[row, :length])
        np.testing.assert_allclose(truth.out[truth.rows.index(row), 0], expected, atol=1e-5)


def test_latents_padding_is_zero_as_in_a_real_cache():
    problem = problem_of("lrkv-full")
    assert problem.cache.rk_BSHR.shape[-1] == 8
    for latent in (problem.cache.rk_BSHR, problem.cache.rv_BSHR):
        assert not np.asarray(latent[..., 3:]).any()
        assert np.asarray(latent[..., :3]).std() == pytest.approx(1, abs=0.2)


def test_pallas_peer_gives_the_oracles_answer_in_its_interpreter(monkeypatch):
    """Its cache is laid out its own way; lengths differ. On a GPU it runs as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu import decode_attention

    interpreted = functools.partial(decode_attention.mqa, interpret=True)
    monkeypatch.setattr(decode_attention, "mqa", interpreted)
    problem = problem_of("gqa", lengths=(100, 256), slots=256, head_width=32)
    peer = IMPLEMENTATIONS["pallas"]
    out, lse = peer.attend(
        problem, problem.queries, problem.factors, peer.arrange(problem.cache), problem.lengths_B
    )
    assert gate.error(gate.truth_of(problem), out, lse) < 1e-5
    assert out.shape == (2, 1, 4, 32)


def test_every_cached_array_is_drawn_in_its_own_dtype():
    problem = problem_of("lrkv-full", dtype="bfloat16")
    assert problem.cache.inverse_norm_BHS.dtype == jnp.float32
    assert problem.cache.rk_BSHR.dtype == problem.queries["q_BTHK"].dtype == jnp.bfloat16
    assert problem.factors["angles_SK"].dtype == jnp.float32
    assert np.asarray(problem.cache.inverse_norm_BHS).min() > 0
