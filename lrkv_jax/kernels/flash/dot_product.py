"""Causal attention that keeps a sequence's weights in memory: fastest for short sequences.

Queries and keys are cut into strips, and each strip of queries attends to its prefix of the keys:
of the T² logits, those right of a strip's end, and of strips left of its window, are never
computed. JAX differentiates it, and keeps the weights.

B batch  T positions  t queries of a strip  S keys that they see  H heads  G key/value heads
N = H / G  X = N · t  W logit width  K head width  C either
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lrkv_jax.kernels.flash.chunked import matmul, transposed
from lrkv_jax.kernels.online import MASKED

# Queries of a strip, at least. On two CPU cores four strips of 64 take 0.76 of the time of one of
# 256, forward and backward. Longer sequences have four as well, since each is compiled apart, or
# with a window strips as wide as that.
STRIP = 64


def causal_attention(q_BTHW, k_BTGW, v_BTGK, *, scale, segments_BT=None, window=None, width=None):
    """`lrkv_jax.kernels.flash.causal_attention`, in strips of `width` queries."""
    B, T, H, W = q_BTHW.shape
    width = width or max(STRIP, min(-(-T // 4), window or T))
    G, K = v_BTGK.shape[2:]
    # Heads before positions, a group's queries in one long axis: each product is then a plain
    # batched matmul. On a CPU this takes 0.55 of the time of einsums over [B, T, H, W].
    q_BGNTW = q_BTHW.reshape(B, T, G, H // G, W).transpose(0, 2, 3, 1, 4)
    k_BGWT, v_BGKT = (x.transpose(0, 2, 3, 1) for x in (k_BTGW, v_BTGK))
    # All three in strips: the gradient of a split is one concatenation, that of slices pads each to
    # T and adds. On a CPU a step is 1.02 to 1.03 times as fast.
    cuts = list(range(width, T, width))
    q_strips, k_strips, v_strips = (jnp.split(x, cuts, axis=3) for x in (q_BGNTW, k_BGWT, v_BGKT))

    def strip(n):
        start, end = n * width, min((n + 1) * width, T)
        first = 0 if window is None else max(0, start - window + 1) // width
        rows = B, G, H // G, end - start
        k_BGWS, v_BGKS = (
            jnp.concatenate(strips[first : n + 1], axis=3) for strips in (k_strips, v_strips)
        )
        logits_BGXS = scale * _product(q_strips[n].reshape(B, G, -1, W), k_BGWS, False)
        back_tS = jnp.arange(start, end)[:, None] - jnp.arange(first * width, end)
        seen_BtS = (back_tS >= 0 if window is None else (back_tS >= 0) & (back_tS < window))[None]
        if segments_BT is not None:
            seen_BtS &= segments_BT[:, start:end, None] == segments_BT[:, None, first * width : end]
        logits_BGNtS = jnp.where(seen_BtS[:, None, None], logits_BGXS.reshape(*rows, -1), MASKED)
        peak_BGNt1 = jax.lax.stop_gradient(logits_BGNtS.max(axis=-1, keepdims=True))
        weights_BGXS = jnp.exp(logits_BGNtS - peak_BGNt1).reshape(logits_BGXS.shape)
        total_BGX1 = weights_BGXS.sum(axis=-1, keepdims=True)
        # Dividing K columns after the product, not S columns before it.
        sums_BGXK = _product(weights_BGXS.astype(v_BTGK.dtype), v_BGKS, True)
        return (sums_BGXK / total_BGX1).astype(v_BTGK.dtype).reshape(*rows, K)

    out_BGNTK = jnp.concatenate([strip(n) for n in range(len(q_strips))], axis=3)
    out_BTHK = out_BGNTK.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)
    return checkpoint_name(out_BTHK, "attended")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(left, right_BGCS, of_transposed):
    """left [B, G, X, C] · right in float32; or left [B, G, X, S] · rightᵀ.

    Right's gradient has its layout, so that what is transposed for it is as narrow as a head.
    """
    return matmul(left, right_BGCS.mT if of_transposed else right_BGCS)


def _forward(left, right_BGCS, of_transposed):
    return _product(left, right_BGCS, of_transposed), (left, right_BGCS)


def _backward(of_transposed, saved, grad):
    left, right_BGCS = saved
    of_left = matmul(grad, right_BGCS if of_transposed else right_BGCS.mT)
    narrow_BGXC, wide_BGXS = (grad, left) if of_transposed else (left, grad)
    of_right_BGCS = matmul(transposed(narrow_BGXC), wide_BGXS)
    return of_left.astype(left.dtype), of_right_BGCS.astype(right_BGCS.dtype)


_product.defvjp(_forward, _backward)
