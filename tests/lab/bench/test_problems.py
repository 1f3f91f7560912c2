"""What is measured: the bytes that must move, the lengths, and answers that an oracle gives too."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import reference
from support.variants import ALL, small

from lrkv_jax.lab.bench import problems
from lrkv_jax.lab.bench.problems import cache_nbytes, reference_of, with_kernel
from lrkv_jax.models.attention import abstract_layer, grouped, lrkv, mla

FULL = "lrkv-full-odd_rank"  # padded


@functools.cache
def problem_of(name, lengths=(5, 9), dtype="float32"):
    """Made once for all tests: nothing in a problem changes."""
    lengths_B = np.array(lengths, np.int32)
    return problems.make_problem(small(ALL[name]), lengths_B, max(lengths), dtype, 0)


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_to_move_are_the_hand_count(dtype, itemsize):
    """Tokens in the cache times a token's bytes; slots that hold none are not read."""
    for name, values, scalars in (
        ("gqa", 2 * 2 * 8, 0),
        ("mla", 12 + 4, 0),
        # Shared key and value, and 4 heads' latents of 3 in rows of 8; a float32 norm a head.
        (FULL, 2 * 8 + 2 * 4 * 8, 4),
        ("lrkv-full-rank_0", 2 * 8, 1),
    ):
        model = small(ALL[name])
        cache = abstract_layer(model).cache_shapes(3, 16, jnp.dtype(dtype))
        a_token = values * itemsize + 4 * scalars
        assert problems.bytes_to_move(cache, np.array([5, 1, 9])) == (5 + 1 + 9) * a_token
        assert cache_nbytes(model, 3, 16, dtype) == 3 * 16 * a_token


def by_xla(problem, cache, lengths_B):
    attend = jax.jit(lambda *arrays: with_kernel(problem, *arrays, "xla"))
    return attend(problem.inputs, cache, lengths_B)


@pytest.mark.slow
@pytest.mark.parametrize("name", [FULL, "gqa", "mla"])
def test_the_reference_is_the_oracles_answer(name, monkeypatch):
    """The oracles in place of the variant's kernels."""

    def oracle(kernel):
        return lambda *arrays, scale, **how: getattr(reference, kernel)(*arrays, scale=scale)

    problem = problem_of(name)
    answer = reference_of(problem)
    assert answer.sequences == [0, 1]
    for module, kernel in ((grouped, "grouped_decode"), (mla, "latent_decode"),
                           (lrkv, "lrkv_decode")):  # fmt: skip
        monkeypatch.setattr(module, kernel, oracle(kernel))
    out, lse = by_xla(problem, problem.cache, problem.lengths_B)
    assert answer.error(out, lse) < 1e-5
    assert np.std(lse) > 0.05 and np.abs(out).std() > 0.1  # a wrong logit would show


@pytest.mark.slow
def test_a_broken_implementation_is_far_from_the_reference():
    problem = problem_of(FULL)
    cache, lengths_B, reference = problem.cache, problem.lengths_B, reference_of(problem)
    out, lse = by_xla(problem, cache, lengths_B)
    bare = replace(cache, rk_BSGR=jnp.zeros_like(cache.rk_BSGR))
    broken = {
        "no residual": by_xla(problem, bare, lengths_B),
        "reads past the length": by_xla(problem, cache, jnp.full_like(lengths_B, 9)),
        "one head": (out.at[:, :, 1].multiply(1.01), lse),
        "NaN": (out.at[-1, 0, 0, 0].set(jnp.nan), lse),
        "log-sum-exp": (out, lse + 1e-2),
    }
    for how, answer in broken.items():
        assert reference.error(*answer) > 1e-3 > problems.tolerance("float32"), how
