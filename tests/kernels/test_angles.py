"""Compressed angles: exact to float32's rounding for every width, base, chunk and position.

B batch  T queries  c slots of a chunk  H heads  K head width  R rank  J frequency pairs
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_cases import compare, lrkv_case
from support.oracle import rope

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.kernels import angles
from lrkv_jax.models.rope import frequencies

WIDTHS, BASES = (2, 16, 64, 128, 256), (100.0, 10_000.0, 500_000.0)
SCALED = RopeScaling(kind="llama3", factor=8, original_context=64)
CHUNKS = (1, 2, 3, 7, 64, 255)
SCALINGS = (
    None,
    RopeScaling(kind="llama3", factor=8, original_context=8192),
    RopeScaling(kind="yarn", factor=4, original_context=32768),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    K=st.sampled_from(WIDTHS),
    base=st.sampled_from(BASES),
    chunk=st.sampled_from(CHUNKS),
    scaling=st.sampled_from(SCALINGS),
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


def test_ranks_at_the_papers_width_are_what_the_docs_say():
    found = [angles.compressed(angles.frequencies(128, 1e4), c) for c in (256, 512, 1024)]
    assert [f.even_nE.shape[1] + f.odd_nO.shape[1] for f in found] == [47, 57, 67]


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    K=st.sampled_from((2, 16, 128)),
    base=st.sampled_from(BASES),
    rank=st.integers(1, 9),
    tokens=st.sampled_from((1, 3)),
    chunk=st.sampled_from((1, 2, 7, 64, 65, 512)),
    start=st.sampled_from((0, 1, 300, 8191, 131_072)),
    keys=st.sampled_from((1, angles.KEYS)),
)
@pytest.mark.slow
def test_residual_logits_are_those_of_rotated_keys(K, base, rank, tokens, chunk, start, keys):
    """For a chunk from `start` on, at once or by blocks; the query is its last or later."""
    rng, H = np.random.default_rng(rank + 100 * chunk), 2
    q_THK = rng.standard_normal((tokens, H, K))
    up_HRK = rng.standard_normal((H, rank, K))
    rk_cHR = rng.standard_normal((chunk, H, rank))
    positions_c = np.arange(start, start + chunk)
    expected_HTc = np.stack(
        [q_THK[:, h] @ rope(rk_cHR[:, h] @ up_HRK[h], positions_c, base).T for h in range(H)]
    )
    # Of one sequence that is a chunk: its slots' angles count from `start`.
    angles_cJ = positions_c[:, None] * np.asarray(angles.frequencies(K, base))
    angles_cK = np.float32(np.concatenate([np.cos(angles_cJ), np.sin(angles_cJ)], axis=-1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(angles, "KEYS", keys)  # 1: blocks of 32 rows of half a chunk, or fewer
        got_cBTH = angles.logits(
            np.float32(q_THK[None]), np.float32(up_HRK), angles_cK, np.float32(rk_cHR[None]),
            np.array([chunk]), angles.frequencies(K, base),
        )  # fmt: skip
    largest = np.linalg.norm(q_THK, axis=-1).max() * np.linalg.norm(
        np.einsum("cHR,HRK->cHK", rk_cHR, up_HRK), axis=-1
    ).max()  # fmt: skip
    assert (
        np.abs(np.asarray(got_cBTH[:, 0], np.float64).transpose(2, 1, 0) - expected_HTc).max()
        < 1e-6 * largest
    )


@pytest.mark.parametrize("chunk", [5, 64])
def test_other_frequencies_than_the_usual_are_decoded(chunk, monkeypatch):
    monkeypatch.setattr(angles, "default_chunk", lambda S, values: min(S, chunk))
    turns = frequencies(16, 300.0, SCALED)
    case = lrkv_case([37, 64, 3], T=2, K=16, R=3, turns_J=turns)
    assert max(compare(case.poisoned().run(impl="xla", frequencies_J=turns), case.truth())) < 2e-6
    assert max(compare(case.run(impl="xla"), case.truth())) > 1e-2  # they matter
