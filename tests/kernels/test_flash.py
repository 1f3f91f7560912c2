"""Whole-sequence attention against a loop in float64."""

import jax
import numpy as np
import pytest

from lrkv_jax.kernels.flash import causal_attention

B, T, H, K, W = 2, 7, 4, 6, 5


def plain(q, k, v, scale, segments=None):
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, h in np.ndindex(q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
        logits = scale * k[b, seen, g] @ q[b, t, h]
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights @ v[b, seen, g] / weights.sum()
    return out


@pytest.mark.parametrize("groups", [1, 2, H])
@pytest.mark.parametrize("segments", [None, np.repeat([[0, 1, 4]], [3, 2, 2], axis=1)])
def test_causal_attention_equals_float64(groups, segments):
    """Fewer key than query heads, values wider or narrower than keys, packed documents."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, n, w)) for n, w in ((H, K), (groups, K), (groups, W)))
    if segments is not None:
        segments = np.concatenate([segments, np.zeros_like(segments)])
    attend = jax.jit(lambda *qkv: causal_attention(*qkv, scale=0.7, segments_BT=segments))
    out = attend(*map(np.float32, (q, k, v)))
    assert out.shape == (B, T, H, W)
    np.testing.assert_allclose(out, plain(q, k, v, 0.7, segments), atol=2e-6)


def test_logits_far_apart_do_not_overflow():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, T, 2, 4)) for _ in range(3))
    out = causal_attention(*map(np.float32, (60 * q, 60 * k, v)), scale=1.0)
    np.testing.assert_allclose(out, plain(60 * q, 60 * k, v, 1.0), atol=1e-3)
