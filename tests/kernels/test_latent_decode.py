"""Absorbed MLA decode against a loop in float64."""

import jax
import numpy as np
import pytest

from lrkv_jax.kernels.latent_decode import latent_decode

B, T, S, H, C = 2, 3, 11, 4, 6
POSITIONS_BT = np.array([[2, 3, 4], [8, 9, 10]])


@pytest.mark.parametrize("rope_width", [0, 4])
def test_latent_decode_equals_float64(rope_width):
    """The latent is key and value; the rope key is key alone; P = 0 has none."""
    rng = np.random.default_rng(0)
    q, q_rope = rng.standard_normal((B, T, H, C)), rng.standard_normal((B, T, H, rope_width))
    latent, rope = rng.standard_normal((B, S, C)), rng.standard_normal((B, S, rope_width))
    latent[0, 5:], rope[0, 5:] = 1e4, -1e4
    out = jax.jit(lambda *a: latent_decode(*a, scale=0.7))(
        *map(np.float32, (q, q_rope, latent, rope)), POSITIONS_BT
    )
    for b, t, h in np.ndindex(B, T, H):
        n = POSITIONS_BT[b, t] + 1
        weights = np.exp(0.7 * (latent[b, :n] @ q[b, t, h] + rope[b, :n] @ q_rope[b, t, h]))
        truth = weights @ latent[b, :n] / weights.sum()
        np.testing.assert_allclose(out[b, t, h], truth, atol=3e-6)
