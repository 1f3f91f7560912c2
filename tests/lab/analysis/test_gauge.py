"""Changes of basis that leave the logits as they are, and the geometry of LRKV's parts."""

from dataclasses import replace

import numpy as np
import pytest
from support import oracle
from support.random_heads import D, H, K, lrkv_heads, mha_heads, parts

from lrkv_jax.lab.analysis.diversity import gram
from lrkv_jax.lab.analysis.heads import cosines, geometry, magnitude, principal_cosines
from lrkv_jax.models.attention.head_weights import SharedResidual

OFFSETS = range(-7, 8)


def logits(query_HDK, key_HDK, offset):
    """Of tokens `offset` apart, whose inputs are the D coordinates: every head's D × D form."""
    turned = oracle.rope(query_HDK.reshape(-1, K), np.full(H * D, offset))
    return turned.reshape(query_HDK.shape) @ key_HDK.swapaxes(1, 2)


def change(a, b):
    """The largest difference over the largest value."""
    return np.abs(a - b).max() / np.abs(a).max()


def test_pair_rotations_keep_the_logits_at_every_offset():
    """Of each head's every frequency pair (j, j + K / 2), by an angle of its own."""
    query, key = np.random.default_rng(0).standard_normal((2, H, D, K))
    angles_HJ = np.random.default_rng(1).uniform(-np.pi, np.pi, (H, K // 2))
    turns, j = np.zeros((H, K, K)), np.arange(K // 2)
    turns[:, j, j] = turns[:, j + K // 2, j + K // 2] = np.cos(angles_HJ)
    turns[:, j, j + K // 2], turns[:, j + K // 2, j] = np.sin(angles_HJ), -np.sin(angles_HJ)
    for offset in OFFSETS:
        moved = logits(query @ turns, key @ turns, offset)
        assert change(logits(query, key, offset), moved) < 1e-10


def test_other_rotations_keep_the_logits_at_offset_zero_alone():
    """So with RoPE the forms' invariance is larger than the model's: A_h is its offset zero."""
    query, key = np.random.default_rng(0).standard_normal((2, H, D, K))
    turns = np.linalg.qr(np.random.default_rng(1).standard_normal((H, K, K)))[0]
    for offset in OFFSETS:
        moved = change(logits(query, key, offset), logits(query @ turns, key @ turns, offset))
        assert moved < 1e-10 if offset == 0 else moved > 0.01


def test_the_residuals_gauge_changes_nothing():
    """U → U G, B → B G⁻ᵀ of each head and family, by any invertible G."""
    layer = lrkv_heads()
    parts = layer.key_parts
    mixes = np.random.default_rng(3).standard_normal((H, 3, 3)) + 2 * np.eye(3)
    moved = SharedResidual(
        parts.shared_DK, parts.down_HDR @ mixes, np.linalg.inv(mixes) @ parts.up_HRK
    )
    after = replace(layer, key_HDK=moved.total_HDK, key_parts=moved)
    np.testing.assert_allclose(moved.total_HDK, parts.total_HDK, atol=1e-10)
    np.testing.assert_allclose(gram(*after.query_key()), gram(*layer.query_key()), rtol=1e-10)
    np.testing.assert_allclose(cosines(moved), cosines(parts), atol=1e-10)
    for before_DR, after_DR in zip(parts.down_HDR, moved.down_HDR, strict=True):
        found = principal_cosines(parts.shared_DK, after_DR)
        np.testing.assert_allclose(found, principal_cosines(parts.shared_DK, before_DR), atol=1e-10)


def test_a_part_moved_between_shared_and_residual_needs_another_rank():
    """(W_shared + Δ) + (U Bᵀ − Δ) is the same matrix, but the residual's rank rises by Δ's: so the
    split is no gauge freedom, whatever the paper says."""
    parts = lrkv_heads().key_parts
    rng = np.random.default_rng(4)
    moved_HDK = parts.residual_HDK - np.outer(rng.standard_normal(D), rng.standard_normal(K))
    assert set(np.linalg.matrix_rank(parts.residual_HDK)) == {3}
    assert set(np.linalg.matrix_rank(moved_HDK)) == {4}


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
    plain = mha_heads()  # without residuals
    assert geometry(plain) is None
    found = magnitude(plain)["key"]
    assert found["shared"] is None and found["residual"] is None
    assert found["total"] == pytest.approx(np.mean([np.linalg.norm(w) for w in plain.key_HDK]))
