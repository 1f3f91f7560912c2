"""Grouped decode against a loop in float64."""

import jax
import numpy as np
import pytest

from lrkv_jax.kernels.grouped_decode import grouped_decode

B, T, S, H, K = 2, 3, 11, 4, 6
POSITIONS_BT = np.array([[2, 3, 4], [8, 9, 10]])


@pytest.mark.parametrize("groups", [1, 2, H])
def test_grouped_decode_equals_float64(groups):
    """Ragged positions, and slots past them full of a large leftover."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, T, H, K))
    k, v = rng.standard_normal((2, B, S, groups, K))
    k[0, 5:], v[0, 5:] = 1e4, -1e4
    out = jax.jit(lambda *a: grouped_decode(*a, scale=0.7))(
        *map(np.float32, (q, k, v)), POSITIONS_BT
    )
    for b, t, h in np.ndindex(B, T, H):
        n, g = POSITIONS_BT[b, t] + 1, h // (H // groups)
        weights = np.exp(0.7 * k[b, :n, g] @ q[b, t, h])
        truth = weights @ v[b, :n, g] / weights.sum()
        np.testing.assert_allclose(out[b, t, h], truth, atol=2e-6)
