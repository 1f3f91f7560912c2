"""Where the paper's mathematics does not hold, at its own shapes; docs/paper.md lists each.

Everything is float64 numpy of formulas that stand in `support.oracle`: no code of the package.
What this project does in their place is tested where it is (`tests/models/attention/test_lrkv.py`),
and what does not hold of heads and their ranks with the statistics (`tests/lab/analysis/`).

T positions  H heads  D width  K head width  R residual rank
"""

from functools import partial

import numpy as np
import pytest
from numpy.linalg import norm
from support.oracle import normed, rope

bare_normed = partial(normed, eps=0)

K = 128
SHAPES = {"128m": (768, 46), "1.2b": (1536, 51), "2.5b": (2304, 55), "6.3b": (4096, 54)}


def off(value, truth):
    """Relative error in the Frobenius norm."""
    return norm(value - truth) / norm(truth)


def head(scale, share, seed=0):
    """(queries, shared keys, latents, B) of a head; its residual is `share` of the shared part.

    64 tokens at positions up to 2,048; weights as the paper's initialization spreads them.
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

    def logits(positions):
        turned, apart = rope(q, positions), rope(shared, positions)
        exact = turned @ rope(shared + latent @ up.T, positions).T
        printed = turned @ (apart + rope(latent, positions) @ up.T).T
        return exact, printed, turned @ apart.T

    exact, printed, dropped = logits(POSITIONS)
    assert off(printed, exact) == pytest.approx(logits_off, rel=0.05)
    assert off(printed, exact) > off(dropped, exact)  # leaving the residual out errs less
    # It forgets that positions are relative.
    exact_later, printed_later, _ = logits(POSITIONS + 50)
    assert off(exact_later, exact) < 1e-10 < 0.05 < off(printed_later, printed)


@pytest.mark.parametrize(("share", "at_least"), [(0.1, 0.8), (1.0, 0.4)])
def test_qk_norm_is_no_sum_over_the_factors_but_one_scalar_a_token_makes_it_exact(share, at_least):
    _, shared, latent, up = head("128m", share)
    residual = latent @ up.T
    exact = bare_normed(shared + residual)
    assert off(bare_normed(shared) + bare_normed(residual), exact) > at_least
    scalar = 1 / np.sqrt(np.mean((shared + residual) ** 2, axis=-1, keepdims=True))
    assert off(shared * scalar + (latent * scalar) @ up.T, exact) < 1e-13
    # It can wait until after the rotation, which keeps norms; with a gain it could not.
    rotated = rope(shared, POSITIONS) + rope(residual, POSITIONS)
    assert off(scalar * rotated, rope(exact, POSITIONS)) < 1e-13
    gain = np.random.default_rng(1).uniform(0.5, 1.5, K)
    assert off(gain * scalar * rotated, rope(gain * exact, POSITIONS)) > 0.1


def test_a_norm_after_the_projection_hides_the_size_of_keys_and_not_of_values():
    """ "Scaling does not affect attention patterns", and so quality? Values have no norm."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 8, K))

    def attend(k, v):
        weights = np.exp(bare_normed(q) @ bare_normed(k).T / K**0.5)
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    assert off(attend(5 * k, v), attend(k, v)) < 1e-12
    assert off(attend(k, 5 * v), attend(k, v)) == pytest.approx(4)
