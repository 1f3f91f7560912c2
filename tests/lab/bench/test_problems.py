"""What is measured: the bytes that must move, the lengths, and answers that agree by two routes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import ENTRIES, from_oracle, model_of, problem_of, truth_of

from lrkv_jax.lab.bench import gate
from lrkv_jax.lab.bench.problems import (
    bytes_to_move,
    cache_nbytes,
    lengths_of,
    materialised,
    with_kernel,
)
from lrkv_jax.models.attention import abstract_layer

# These programs run once and need no optimising.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


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
    model = model_of(name)
    cache = abstract_layer(model).cache_shapes(3, 16, jnp.dtype(dtype))
    a_token = values * itemsize + 4 * scalars
    assert bytes_to_move(cache, np.array([5, 1, 9])) == (5 + 1 + 9) * a_token
    assert bytes_to_move(cache, np.array([16, 16, 16])) == cache_nbytes(model, 3, 16, dtype)
    assert cache_nbytes(model, 3, 16, dtype) == 3 * 16 * a_token


def test_a_problem_s_bytes_are_those_of_its_live_cache():
    problem = problem_of("lrkv-full")
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.cache))
    assert live == cache_nbytes(problem.model, 2, 9, "float32")
    assert problem.bytes_to_move == live * (5 + 9) // (2 * 9)


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
def test_every_route_to_the_heads_outputs_gives_one_answer(name):
    """The layer's decode, the float32 oracle of its kernel, and whole keys attended to in float64.

    Oracle and truth share no code: one is written from the equations of each factored cache, the
    other attends to what the layer says that the cache stands for.
    """
    problem, truth = problem_of(name), truth_of(name)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def routes(*arrays):
        kernel = with_kernel(problem, *arrays, impl="xla")
        return kernel, from_oracle(problem, *arrays), materialised(problem, *arrays)

    kernel, oracle, whole = routes(problem.inputs, problem.cache, problem.lengths_B)
    assert gate.error(truth, *kernel) < 1e-5
    assert gate.error(truth, *oracle) < 1e-5
    q_BTHW, k_BSGW, v_BSGK = (np.asarray(a, np.float64) for a in whole)
    group = q_BTHW.shape[2] // k_BSGW.shape[2]
    for row, length in enumerate(np.asarray(problem.lengths_B)):
        k_SHW = np.repeat(k_BSGW[row, :length], group, axis=1)
        logits_HS = np.einsum("hx,shx->hs", q_BTHW[row, 0], k_SHW) * problem.abstract.scale
        assert 0.3 < logits_HS.std() < 3  # neither flat nor one-hot: a wrong logit shows
        assert v_BSGK[row, :length].std() > 0.5


def test_latents_padding_is_zero_as_in_a_real_cache():
    problem = problem_of("lrkv-full")
    assert problem.cache.rk_BSGR.shape[-1] == 8
    for latent in (problem.cache.rk_BSGR, problem.cache.rv_BSGR):
        assert not np.asarray(latent[..., 3:]).any()
        assert np.asarray(latent[..., :3]).std() == pytest.approx(1, abs=0.2)


def test_every_cached_array_is_drawn_in_its_own_dtype():
    problem = problem_of("lrkv-full", dtype="bfloat16")
    assert problem.cache.inverse_norm_BGS.dtype == jnp.float32
    assert problem.cache.rk_BSGR.dtype == problem.inputs.query[0].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(problem.inputs.weights)} == {
        jnp.dtype("bfloat16")
    }
    assert problem.inputs.angles.dtype == jnp.float32
    assert np.asarray(problem.cache.inverse_norm_BGS).min() > 0
