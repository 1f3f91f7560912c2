"""Angles and norms of LRKV's parts, against planted ones and random ones."""

import numpy as np
import pytest
from support.random_heads import D, H, K, lrkv_heads, mha_heads, parts

from lrkv_jax.lab.analysis.heads import cosines, geometry, magnitude, principal_cosines


def test_principal_cosines_are_those_that_were_planted():
    angles = np.array([0.0, 0.3, 1.1, np.pi / 2])
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((20, 8)))[0]
    turned = basis[:, :4] * np.cos(angles) + basis[:, 4:] * np.sin(angles)
    mixed = turned @ np.random.default_rng(1).standard_normal((4, 4))
    found = principal_cosines(basis[:, :4] @ np.diag([1.0, 9.0, 1e3, 0.1]), mixed)
    np.testing.assert_allclose(found, np.cos(angles), atol=1e-12)


def test_random_parts_lie_as_the_nulls_say():
    """Means over 400 random heads, within 4 of their own standard errors of the printed nulls."""
    many = parts(H=400, D=40, K=10, R=3)
    found = cosines(many)
    sd = (40 * 10) ** -0.5
    assert abs(found.mean()) < 4 * sd / 20
    assert found.std() == pytest.approx(sd, rel=4 / np.sqrt(2 * 400))
    squares = [
        np.mean(principal_cosines(many.shared_DK, down_DR) ** 2) for down_DR in many.down_HDR
    ]
    assert abs(np.mean(squares) - 10 / 40) < 4 * np.std(squares) / 20


def test_geometry_of_a_layer():
    heads = lrkv_heads()
    found = geometry(heads)
    for name, family in (("key", heads.key_parts), ("value", heads.value_parts)):
        one = found[name]
        norms_H = np.linalg.norm(family.residual_HDK, axis=(1, 2))
        products_H = np.einsum("DK,HDK->H", family.shared_DK, family.residual_HDK) / norms_H
        np.testing.assert_allclose(
            one["cosine"], products_H / np.linalg.norm(family.shared_DK), rtol=1e-12
        )
        angles = [principal_cosines(family.shared_DK, down_DR) for down_DR in family.down_HDR]
        assert [len(row) for row in angles] == [3] * H
        assert one["mean_square"] == pytest.approx(np.mean(np.square(angles)))
        assert one["mean_square_null"] == pytest.approx(K / D)
        assert one["cosine_null_sd"] == pytest.approx((D * K) ** -0.5)


def test_heads_without_residuals_have_no_geometry():
    heads = mha_heads()
    assert geometry(heads) is None
    found = magnitude(heads)["key"]
    assert found["shared"] is None and found["residual"] is None
    assert found["total"] == pytest.approx(np.mean([np.linalg.norm(w) for w in heads.key_HDK]))
