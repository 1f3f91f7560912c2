"""Decode problems of every variant at a size that takes milliseconds, made once for all tests."""

import functools

import numpy as np
import pytest
from support import reference
from support.variants import ALL, small

from lrkv_jax.lab.bench import gate
from lrkv_jax.lab.bench.problems import make_problem
from lrkv_jax.models.attention import LRKV, grouped, lrkv, mla

# Of LRKV the odd rank, which is padded, in each mode.
ENTRIES = {
    name.removesuffix("-odd_rank").replace("full-rank_0", "rank_0"): entry
    for name, entry in ALL.items()
    if not isinstance(entry, LRKV) or name.endswith("-odd_rank") or name == "lrkv-full-rank_0"
}


def model_of(name, **changes):
    return small(ENTRIES[name], **changes)


@functools.cache
def problem_of(name, lengths=(5, 9), slots=9, dtype="float32", **changes):
    """Made once for all tests: nothing in a problem changes."""
    return make_problem(model_of(name, **changes), np.array(lengths, np.int32), slots, dtype, 0)


@functools.cache
def truth_of(name):
    return gate.truth_of(problem_of(name))


def from_oracle(problem, inputs, cache, lengths_B):
    """Heads' outputs and log-sum-exp, the float32 oracles in place of the line's kernels."""

    def oracle(kernel):
        def call(*arrays, scale, **how):
            return getattr(reference, kernel)(*arrays, scale=scale)

        return call

    layer = problem.layer(inputs.weights)
    with pytest.MonkeyPatch.context() as patch:
        for module in (grouped, lrkv, mla):
            for kernel in ("grouped_decode", "latent_decode", "lrkv_decode"):
                if hasattr(module, kernel):
                    patch.setattr(module, kernel, oracle(kernel))
        return layer.attend_cached(inputs.query, cache, lengths_B[:, None] - 1, inputs.angles)
