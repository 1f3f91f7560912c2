"""Compressed angles: exact to float32's rounding for every width, base, chunk and position.

B batch  T queries  c slots of a chunk  H heads  K head width  R rank  J frequency pairs
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_cases import compare, lrkv_case

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.kernels import angles
from lrkv_jax.models.rope import frequencies

LLAMA3 = RopeScaling(kind="llama3", factor=8, original_context=8192)
YARN = RopeScaling(kind="yarn", factor=4, original_context=32768)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    K=st.sampled_from([2, 16, 64, 128, 256]),
    base=st.sampled_from([100.0, 10_000.0, 500_000.0]),
    chunk=st.sampled_from([1, 2, 3, 7, 64, 255]),
    scaling=st.sampled_from([None, LLAMA3, YARN]),
)
def test_the_computed_ranks_suffice_and_none_could_go(K, base, chunk, scaling):
    """Of scaled frequencies too, which are no powers of one number."""
    turns_J = frequencies(K, base, scaling)
    theta_J = np.array(turns_J)
    found = angles.compressed(turns_J, chunk)
    middle = (chunk - 1) / 2
    upper_nJ = np.outer(np.arange(chunk // 2, chunk) - middle, theta_J)
    for left, right, wanted in (
        (found.even_nE, found.even_EJ, np.cos(upper_nJ)),
        (found.odd_nO, found.odd_OJ, np.sin(upper_nJ)),
    ):
        left, right = left.astype(np.float64), right.astype(np.float64)
        # Factors in float32 add their own rounding: of entries of order 1, over at most K / 2.
        assert np.abs(left @ right - wanted).max() < 4e-7
        rank = left.shape[1]
        assert rank <= min(wanted.shape)
        if rank > 1:  # the best approximation of one rank less is not exact
            singular = np.linalg.svd(wanted, compute_uv=False)
            assert singular[rank - 1] > angles.EXACT_TO


@pytest.mark.parametrize("chunk", [5, 131])
def test_other_frequencies_than_the_usual_are_decoded(chunk, monkeypatch):
    """In odd chunks; products of the longer ones are by blocks of their rows."""
    monkeypatch.setattr(angles, "default_chunk", lambda S, values: chunk)
    monkeypatch.setattr(angles, "KEYS", 1)
    turns = frequencies(16, 300.0, RopeScaling(kind="llama3", factor=8, original_context=64))
    case = lrkv_case([chunk + 4, 2 * chunk + 3, 3], T=2, H=2, K=16, R=3, turns_J=turns)
    assert max(compare(case.poisoned().run(impl="xla", frequencies_J=turns), case.truth())) < 2e-6
