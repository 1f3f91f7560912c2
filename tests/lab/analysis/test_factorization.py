"""Fits of shared + rank-R families: planted ones are found, optima are not beaten."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_heads import lrkv_heads

from lrkv_jax.interop import fits
from lrkv_jax.lab.analysis.factorization import around, factorization, form_error, relative_error


def error(family_HDK, shared_DK, rank):
    return relative_error(family_HDK, around(shared_DK, family_HDK, rank).total_HDK)


@pytest.mark.parametrize("H, D, K, R, scale", [(4, 24, 8, 3, 0.1), (6, 40, 16, 8, 4.0)])
def test_a_planted_family_is_recovered(H, D, K, R, scale):
    """So is the shared part, of which residuals are `scale` times as large."""
    rng = np.random.default_rng(0)
    shared_DK = rng.standard_normal((D, K))
    residual_HDK = rng.standard_normal((H, D, R)) @ rng.standard_normal((H, R, K))
    norms_H = np.linalg.norm(residual_HDK, axis=(1, 2))
    residual_HDK *= scale * np.linalg.norm(shared_DK) / norms_H[:, None, None]
    family_HDK = shared_DK + residual_HDK
    fit = around(fits.alternating(family_HDK, R), family_HDK, R)
    assert relative_error(family_HDK, fit.total_HDK) < 1e-6
    assert relative_error(shared_DK, fit.shared_DK) < 1e-6
    assert np.linalg.matrix_rank(fit.residual_HDK, tol=1e-6).tolist() == [R] * H
    assert error(family_HDK, family_HDK.mean(axis=0), R) > 0.01


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(2, 12), st.integers(1, 8), st.data())
def test_the_order_of_the_fits_holds_for_any_family(H, D, K, data):
    rank = data.draw(st.integers(0, min(D, K)))
    family_HDK = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((H, D, K))
    ended = error(family_HDK, fits.alternating(family_HDK, rank), rank)
    begun = error(family_HDK, family_HDK.mean(axis=0), rank)
    assert ended <= begun + 1e-7
    # SVDs by LAPACK: the tail of each head's own, and of its deviations.
    tails = np.linalg.svd(family_HDK, compute_uv=False)[:, rank:]
    alone = np.linalg.norm(tails) / np.linalg.norm(family_HDK)
    assert error(family_HDK, np.zeros((D, K)), rank) == pytest.approx(alone, abs=1e-7)
    tails = np.linalg.svd(family_HDK - family_HDK.mean(axis=0), compute_uv=False)[:, rank:]
    assert begun == pytest.approx(np.linalg.norm(tails) / np.linalg.norm(family_HDK), abs=1e-7)


def test_each_iteration_lowers_the_error():
    family_HDK = np.random.default_rng(0).standard_normal((5, 20, 8))
    shared = [fits.alternating(family_HDK, 3, iterations=n) for n in range(12)]
    errors = [error(family_HDK, shared_DK, 3) for shared_DK in shared]
    assert np.all(np.diff(errors) < 0)
    assert errors[0] == error(family_HDK, family_HDK.mean(axis=0), 3)


def test_form_error_is_that_of_forms_really_made():
    rng = np.random.default_rng(0)
    left, family, guess = rng.standard_normal((3, 4, 12, 5))
    made = np.einsum("HDK,HEK->HDE", left, family - guess)
    whole = np.einsum("HDK,HEK->HDE", left, family)
    truth = np.linalg.norm(made) / np.linalg.norm(whole)
    assert form_error(left, family, guess) == pytest.approx(truth, rel=1e-12)
    assert form_error(left, family, family) == 0
    assert form_error(0 * left, family, guess) == 0


def test_lrkv_fits_itself_at_its_own_rank_and_not_below():
    heads = lrkv_heads()  # rank 3
    for family in ("key", "value"):
        own = factorization(heads, 3)[family]
        assert own["alternating"]["error"] < 1e-6
        assert 0.05 < own["mean_svd"]["error"] < own["svd"]["error"]
        below = factorization(heads, 1)[family]
        assert below["mean_svd"]["error"] > below["alternating"]["error"] > 0.1
