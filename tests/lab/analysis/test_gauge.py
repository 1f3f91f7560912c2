"""What an analysis may not see: changes of basis that leave the model's logits as they are."""

from dataclasses import replace

import numpy as np
from support import oracle
from support.random_heads import lrkv_heads

from lrkv_jax.lab.analysis.diversity import gram
from lrkv_jax.lab.analysis.heads import cosines, principal_cosines
from lrkv_jax.models.attention.head_weights import SharedResidual

H, D, K = 4, 14, 6
OFFSETS = range(-7, 8)


def pair_rotations(seed=1):
    """A rotation of each head's every frequency pair (j, j + K / 2), by angles of its own."""
    angles_HJ = np.random.default_rng(seed).uniform(-np.pi, np.pi, (H, K // 2))
    turns, j = np.zeros((H, K, K)), np.arange(K // 2)
    turns[:, j, j] = turns[:, j + K // 2, j + K // 2] = np.cos(angles_HJ)
    turns[:, j, j + K // 2], turns[:, j + K // 2, j] = np.sin(angles_HJ), -np.sin(angles_HJ)
    return turns


def logits(query_HDK, key_HDK, offset):
    """Of tokens `offset` apart, whose inputs are the D coordinates: every head's D × D form."""
    turned = oracle.rope(query_HDK.reshape(-1, K), np.full(H * D, offset))
    return turned.reshape(query_HDK.shape) @ key_HDK.swapaxes(1, 2)


def change(a, b):
    """The largest difference over the largest value."""
    return np.abs(a - b).max() / np.abs(a).max()


def test_pair_rotations_keep_the_logits_at_every_offset():
    query, key = np.random.default_rng(0).standard_normal((2, H, D, K))
    turns = pair_rotations()
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
    heads_, _, R = parts.down_HDR.shape
    mixes = np.random.default_rng(3).standard_normal((heads_, R, R)) + 2 * np.eye(R)
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
    D, K = parts.shared_DK.shape
    rng = np.random.default_rng(4)
    moved_HDK = parts.residual_HDK - np.outer(rng.standard_normal(D), rng.standard_normal(K))
    assert set(np.linalg.matrix_rank(parts.residual_HDK)) == {3}
    assert set(np.linalg.matrix_rank(moved_HDK)) == {4}
