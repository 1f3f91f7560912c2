"""Causal attention in plain XLA, a tile of logits at a time: memory is linear in T.

FlashAttention's recurrences (Dao 2023, https://arxiv.org/abs/2307.08691) as one loop over pairs of
a query chunk and a key chunk at or below the diagonal: about half of the T² logits are computed,
and with a window only tiles that it reaches.
The forward pass keeps each row's log-sum-exp, from which the backward pass recomputes the weights.

B batch  T positions, padded to n chunks of c  H heads  G key/value heads  N = H / G
X = N · c queries of a group in a chunk  W logit width  K head width
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lrkv_jax.kernels.online import MASKED

matmul = partial(jnp.matmul, preferred_element_type=jnp.float32)


def default_chunk(T):
    """128 positions on a CPU, where tiles of all heads should stay in its cache; 512 elsewhere."""
    return min(T, 128 if jax.default_backend() == "cpu" else 512)


def causal_attention(q_BTHW, k_BTGW, v_BTGK, *, scale, segments_BT=None, window=None, chunk=None):
    """`lrkv_jax.kernels.flash.causal_attention`, with tiles of `chunk` queries and keys."""
    chunk = chunk or default_chunk(q_BTHW.shape[1])
    return _attend(q_BTHW, k_BTGW, v_BTGK, segments_BT, float(scale), chunk, window)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q_BTHW, k_BTGW, v_BTGK, segments_BT, scale, chunk, window):
    return _forward(q_BTHW, k_BTGW, v_BTGK, segments_BT, scale, chunk, window)[0]


def _forward(q_BTHW, k_BTGW, v_BTGK, segments_BT, scale, chunk, window):
    B, T, H, _ = q_BTHW.shape
    G, K = v_BTGK.shape[2:]
    q_nBGXW, k_nBGcW, v_nBGcK = (_chunks(x, chunk, G) for x in (q_BTHW, k_BTGW, v_BTGK))
    seen = _masks(segments_BT, T, chunk, window)
    n, rows = len(q_nBGXW), (B, G, H // G, chunk)

    def tile(carry, pair):
        out_nBGNcK, lse_nBGNc, sums_BGNcK, total_BGNc, peak_BGNc = carry
        i, j = pair
        logits_BGXc = scale * matmul(q_nBGXW[i], k_nBGcW[j].swapaxes(2, 3))
        logits_BGNcc = jnp.where(seen(i, j), logits_BGXc.reshape(*rows, chunk), MASKED)
        # A query chunk's first tile is the diagonal one: every row sees itself there.
        last_BGNc = jnp.where(i == j, MASKED, peak_BGNc)
        peak_BGNc = jnp.maximum(last_BGNc, logits_BGNcc.max(axis=-1))
        decay_BGNc = jnp.exp(last_BGNc - peak_BGNc)
        weights_BGNcc = jnp.exp(logits_BGNcc - peak_BGNc[..., None])
        total_BGNc = decay_BGNc * total_BGNc + weights_BGNcc.sum(axis=-1)
        weights_BGXc = weights_BGNcc.reshape(B, G, -1, chunk).astype(v_BTGK.dtype)
        new_BGXK = matmul(weights_BGXc, v_nBGcK[j])
        sums_BGNcK = decay_BGNc[..., None] * sums_BGNcK + new_BGXK.reshape(*rows, K)
        # Only a query chunk's last tile leaves its mean; what is written before is overwritten.
        mean_BGNcK = (sums_BGNcK / total_BGNc[..., None]).astype(v_BTGK.dtype)
        out_nBGNcK = _put(out_nBGNcK, mean_BGNcK, i)
        lse_nBGNc = _put(lse_nBGNc, peak_BGNc + jnp.log(total_BGNc), i)
        return (out_nBGNcK, lse_nBGNc, sums_BGNcK, total_BGNc, peak_BGNc), None

    one = jnp.zeros(rows)
    start = (
        jnp.zeros((n, *rows, K), v_BTGK.dtype), jnp.zeros((n, *rows)),
        jnp.zeros((*rows, K)), one, one,
    )  # fmt: skip
    (out_nBGNcK, lse_nBGNc, *_), _ = jax.lax.scan(tile, start, _pairs(n, chunk, window))
    # Named for the training step, which may keep them and compute all else again.
    out_BTHK = checkpoint_name(_joined(out_nBGNcK, T), "attended")
    lse_nBGNc = checkpoint_name(lse_nBGNc, "logsumexp")
    return out_BTHK, (q_BTHW, k_BTGW, v_BTGK, segments_BT, out_BTHK, lse_nBGNc)


def _backward(scale, chunk, window, saved, grad_BTHK):
    q_BTHW, k_BTGW, v_BTGK, segments_BT, out_BTHK, lse_nBGNc = saved
    B, T, H, _ = q_BTHW.shape
    G, dtype = v_BTGK.shape[2], q_BTHW.dtype
    grad_BTHK = grad_BTHK.astype(dtype)
    # What the softmax's normalization subtracts from each row of the weights' gradient.
    mean_BTH1 = jnp.sum(grad_BTHK * out_BTHK, axis=-1, keepdims=True, dtype=jnp.float32)
    q_nBGXW, k_nBGcW, v_nBGcK, grad_nBGXK, mean_nBGX1 = (
        _chunks(x, chunk, G) for x in (q_BTHW, k_BTGW, v_BTGK, grad_BTHK, mean_BTH1)
    )
    seen = _masks(segments_BT, T, chunk, window)
    rows = (B, G, H // G, chunk)

    def tile(carry, pair):
        dq_nBGXW, dk_nBGWc, dv_nBGKc = carry
        i, j = pair
        logits_BGXc = scale * matmul(q_nBGXW[i], k_nBGcW[j].swapaxes(2, 3))
        weights_BGNcc = jnp.exp(logits_BGXc.reshape(*rows, chunk) - lse_nBGNc[i][..., None])
        weights_BGXc = jnp.where(seen(i, j), weights_BGNcc, 0).reshape(logits_BGXc.shape)
        dv_BGKc = matmul(transposed(grad_nBGXK[i]), weights_BGXc.astype(dtype))
        dweights_BGXc = matmul(grad_nBGXK[i], v_nBGcK[j].swapaxes(2, 3))
        dlogits_BGXc = (scale * weights_BGXc * (dweights_BGXc - mean_nBGX1[i])).astype(dtype)
        dq_BGXW = matmul(dlogits_BGXc, k_nBGcW[j])
        dk_BGWc = matmul(transposed(q_nBGXW[i]), dlogits_BGXc)
        return (
            _put(dq_nBGXW, dq_nBGXW[i] + dq_BGXW, i),
            _put(dk_nBGWc, dk_nBGWc[j] + dk_BGWc, j),
            _put(dv_nBGKc, dv_nBGKc[j] + dv_BGKc, j),
        ), None

    start = tuple(jnp.zeros(x.shape) for x in (q_nBGXW, k_nBGcW.mT, v_nBGcK.mT))
    (dq_nBGXW, dk_nBGWc, dv_nBGKc), _ = jax.lax.scan(
        tile, start, _pairs(len(q_nBGXW), chunk, window)
    )
    dq_BTHW = _joined(dq_nBGXW.reshape(-1, *rows, q_BTHW.shape[-1]), T)
    dk_BTGW, dv_BTGK = (
        _joined(stack.mT[:, :, :, None], T).astype(x.dtype)
        for stack, x in ((dk_nBGWc, k_BTGW), (dv_nBGKc, v_BTGK))
    )
    return dq_BTHW.astype(dtype), dk_BTGW, dv_BTGK, None


_attend.defvjp(_forward, _backward)


def transposed(x_BGXW):
    """[B, G, W, X], laid out anew on a CPU, where XLA's product takes 2.5 times as long without."""
    return jax.lax.optimization_barrier(x_BGXW.mT) if jax.default_backend() == "cpu" else x_BGXW.mT


def _pairs(n, chunk, window):
    """Query and key chunk of every tile: a query chunk at a time, from the diagonal backwards.

    To key 0, or to the first that the chunk's first query has in its window.
    """
    first = [0 if window is None else max(0, i * chunk - window + 1) // chunk for i in range(n)]
    pairs = [(i, j) for i in range(n) for j in range(i, first[i] - 1, -1)]
    return tuple(jnp.array(pairs, jnp.int32).T)


def _put(stack, item, index):
    return jax.lax.dynamic_update_index_in_dim(stack, item, index, 0)


def _chunks(x_BTHW, chunk, groups):
    """[B, T, H, W] → [n, B, G, N · c, W]: heads before positions, a group's queries in one axis.

    Each product is then a plain batched matmul. T is padded with zeros to n · c: no real position
    sees the padding, which comes later, and the padding's rows are dropped.
    """
    B, T, H, W = x_BTHW.shape
    x_BTHW = jnp.pad(x_BTHW, ((0, 0), (0, -T % chunk), (0, 0), (0, 0)))
    x_BncGNW = x_BTHW.reshape(B, -1, chunk, groups, H // groups, W)
    x_nBGNcW = x_BncGNW.transpose(1, 0, 3, 4, 2, 5)
    return x_nBGNcW.reshape(*x_nBGNcW.shape[:3], -1, W)


def _joined(x_nBGNcW, T):
    """[n, B, G, N, c, W] → [B, T, H, W], without the padding."""
    n, B, G, N, chunk, W = x_nBGNcW.shape
    return x_nBGNcW.transpose(1, 0, 4, 2, 3, 5).reshape(B, n * chunk, G * N, W)[:, :T]


def _masks(segments_BT, T, chunk, window):
    """seen(i, j): which queries of chunk i see which keys of chunk j, as a mask of the tile."""
    back_cc = jnp.arange(chunk)[:, None] - jnp.arange(chunk)

    def near(i, j):
        if window is None:
            return (back_cc >= 0) | (j < i)
        back_of_tile_cc = back_cc + (i - j) * chunk
        return (back_of_tile_cc >= 0) & (back_of_tile_cc < window)

    if segments_BT is None:
        return near
    segments_BT = jnp.pad(segments_BT, ((0, 0), (0, -T % chunk)))
    segments_nBc = segments_BT.reshape(len(segments_BT), -1, chunk).swapaxes(0, 1)

    def seen(i, j):
        same_Bcc = segments_nBc[i][:, :, None] == segments_nBc[j][:, None]
        return (same_Bcc & near(i, j))[:, None, None]

    return seen
