"""Where the paper's mathematics does not hold, at its own shapes; docs/paper.md tells each.

Everything is float64 numpy, and nothing of the package takes part: these are facts about formulas.
What this project does in their place is tested where it is (`tests/attention/test_lrkv.py`).

T positions  H heads  D width  K head width  R residual rank
"""

import numpy as np
import pytest
from numpy.linalg import matrix_rank, norm, qr, svd

K = 128
SHAPES = {"128m": (768, 46), "1.2b": (1536, 51), "2.5b": (2304, 55), "6.3b": (4096, 54)}


def rotate(x_TW, positions_T, base=10_000.0):
    """RoPE in half-split order; an odd last coordinate is left alone."""
    W = x_TW.shape[-1]
    J = W // 2
    angles = positions_T[:, None] * base ** (-2 * np.arange(J) / W)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b, rest = x_TW[:, :J], x_TW[:, J : 2 * J], x_TW[:, 2 * J :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rms_normed(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))


def off(value, truth):
    """Relative error in the Frobenius norm."""
    return norm(value - truth) / norm(truth)


def head(scale, share, seed=0):
    """(queries, shared keys, latents, B) of a head; its residual is `share` of the shared part.

    64 tokens at positions up to 2,048; weights as the paper's initialisation spreads them.
    """
    rng, (D, R) = np.random.default_rng(seed), SHAPES[scale]
    x_TD = rng.standard_normal((64, D)) / D**0.5
    shared_DK, down_DR = rng.standard_normal((D, K)), rng.standard_normal((D, R))
    up_KR = rng.standard_normal((K, R)) * share / R**0.5
    return rng.standard_normal((64, K)), x_TD @ shared_DK, x_TD @ down_DR, up_KR


POSITIONS = np.arange(0, 2048, 32)


@pytest.mark.parametrize("scale", SHAPES)
@pytest.mark.parametrize(("share", "logits_off"), [(0.1, 0.135), (1.0, 0.955)])
def test_rope_does_not_distribute_over_the_factors(scale, share, logits_off):
    """RoPE(K_h) = RoPE(K_shared) + RoPE(R_h) Bᵀ: wrong by 13 % of the logits, then by 95 %."""
    q, shared, latent, up = head(scale, share)
    turned = rotate(q, POSITIONS)
    exact = turned @ rotate(shared + latent @ up.T, POSITIONS).T
    printed = turned @ (rotate(shared, POSITIONS) + rotate(latent, POSITIONS) @ up.T).T
    dropped = turned @ rotate(shared, POSITIONS).T
    assert off(printed, exact) == pytest.approx(logits_off, rel=0.05)
    assert off(printed, exact) > off(dropped, exact)  # leaving the residual out errs less


def test_odd_ranks_have_no_rotation_of_their_own():
    assert [R % 2 for _, R in SHAPES.values()] == [0, 1, 1, 0]


@pytest.mark.parametrize(("share", "at_least"), [(0.1, 0.8), (1.0, 0.4)])
def test_qk_norm_is_no_sum_over_the_factors_but_one_scalar_a_token_makes_it_exact(share, at_least):
    _, shared, latent, up = head("128m", share)
    residual = latent @ up.T
    exact = rms_normed(shared + residual)
    assert off(rms_normed(shared) + rms_normed(residual), exact) > at_least
    scalar = 1 / np.sqrt(np.mean((shared + residual) ** 2, axis=-1, keepdims=True))
    assert off(shared * scalar + (latent * scalar) @ up.T, exact) < 1e-13
    # It can wait until after the rotation, which keeps norms; with a gain it could not.
    rotated = rotate(shared, POSITIONS) + rotate(residual, POSITIONS)
    assert off(scalar * rotated, rotate(exact, POSITIONS)) < 1e-13
    gain = np.random.default_rng(1).uniform(0.5, 1.5, K)
    assert off(gain * scalar * rotated, rotate(gain * exact, POSITIONS)) > 0.1


# Head diversity.


def effective_rank(gram_HH):
    values = np.clip(np.linalg.eigvalsh(gram_HH), 0, None)
    shares = values[values > 1e-12 * values.max()] / values.sum()
    return np.exp(-np.sum(shares * np.log(shares)))


def centred(gram_HH):
    H = len(gram_HH)
    rest = np.eye(H) - 1 / H
    return rest @ gram_HH @ rest


def forms_gram(queries_HDK, keys_HDK):
    """Normalised inner products of W_Q W_Kᵀ."""
    flat = [(q @ k.T).ravel() for q, k in zip(queries_HDK, keys_HDK, strict=True)]
    gram = np.array([[a @ b for b in flat] for a in flat])
    lengths = np.sqrt(np.diag(gram))
    return gram / np.outer(lengths, lengths)


@pytest.mark.parametrize("H", [6, 18])
def test_centred_effective_rank_is_capped_one_below_the_heads(H):
    """Heads that have nothing in common reach (H − 1) / H, and so do MQA's at random."""
    assert effective_rank(np.eye(H)) == pytest.approx(H)
    assert effective_rank(centred(np.eye(H))) == pytest.approx(H - 1)
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((2, H, 96, 12))
    for of in (keys, np.broadcast_to(keys[0], keys.shape)):  # MHA, MQA
        assert effective_rank(centred(forms_gram(queries, of))) > 0.98 * (H - 1)


def test_the_gauge_of_a_head_is_smaller_with_rope():
    """Any rotation of a head's coordinates without RoPE; with it, only those of frequency pairs."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 64, K))
    any_rotation = qr(rng.standard_normal((K, K)))[0]
    angles = rng.uniform(0, 2 * np.pi, K // 2)
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    of_pairs = np.block([[cos, sin], [-sin, cos]])

    def logits(turn):
        return rotate(q @ turn, POSITIONS) @ rotate(k @ turn, POSITIONS).T

    assert off((q @ any_rotation) @ (k @ any_rotation).T, q @ k.T) < 1e-13
    assert off(logits(any_rotation), logits(np.eye(K))) > 0.1
    assert off(logits(of_pairs), logits(np.eye(K))) < 1e-12


def test_the_factors_are_not_free_to_move_by_any_matrix():
    """U Bᵀ − Δ has rank R + 1 for a generic Δ of rank one: no residual of rank R equals it."""
    rng = np.random.default_rng(0)
    down, up = rng.standard_normal((40, 6)), rng.standard_normal((16, 6))
    delta = np.outer(rng.standard_normal(40), rng.standard_normal(16))
    assert matrix_rank(down @ up.T) == 6
    assert matrix_rank(down @ up.T - delta) == 7
    gauge = rng.standard_normal((6, 6))  # what is free
    assert off((down @ gauge) @ (up @ np.linalg.inv(gauge).T).T, down @ up.T) < 1e-12


def test_mean_and_truncated_svd_are_not_the_best_shared_part_and_residuals():
    """Fitted in turns, a shared part and residuals of rank R err less than the mean and its SVD."""
    H, R = 6, 4
    heads = np.random.default_rng(0).standard_normal((H, 24, 16))

    def residuals(shared):
        u, s, v = svd(heads - shared, full_matrices=False)
        return (u[..., :R] * s[:, None, :R]) @ v[:, :R]

    shared = heads.mean(axis=0)
    of_the_mean = off(shared + residuals(shared), heads)
    for _ in range(30):
        shared = (heads - residuals(shared)).mean(axis=0)
    assert off(shared + residuals(shared), heads) < 0.97 * of_the_mean


def test_a_norm_after_the_projection_hides_the_size_of_keys_and_not_of_values():
    """ "Scaling does not affect attention patterns", and so quality? Values have no norm."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 8, K))

    def attend(k, v):
        weights = np.exp(rms_normed(q) @ rms_normed(k).T / K**0.5)
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    assert off(attend(5 * k, v), attend(k, v)) < 1e-12
    assert off(attend(k, 5 * v), attend(k, v)) == pytest.approx(4)
