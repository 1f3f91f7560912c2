"""Causal attention in plain XLA, a tile of logits at a time: memory is linear in T.

FlashAttention's recurrences (Dao 2023, https://arxiv.org/abs/2307.08691) as one loop over pairs of
a query chunk and a key chunk at or below the diagonal: about half of the T² logits are computed.
The forward pass keeps each row's log-sum-exp, from which the backward pass recomputes the weights.

B batch  T positions, padded to n chunks of c  H heads  G key/value heads  N = H / G
X = N · c queries of a group in a chunk  K key width  W value width
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lrkv_jax.kernels.online import MASKED

_F32 = {"preferred_element_type": jnp.float32}


def default_chunk(T):
    """128 positions on a CPU, where tiles of all heads should stay in its cache; 512 elsewhere."""
    return min(T, 128 if jax.default_backend() == "cpu" else 512)


def causal_attention(q_BTHK, k_BTGK, v_BTGW, *, scale, segments_BT=None, chunk=None):
    """`lrkv_jax.kernels.flash.causal_attention`, with tiles of `chunk` queries and keys."""
    chunk = chunk or default_chunk(q_BTHK.shape[1])
    return _attend(q_BTHK, k_BTGK, v_BTGW, segments_BT, float(scale), chunk)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q_BTHK, k_BTGK, v_BTGW, segments_BT, scale, chunk):
    return _forward(q_BTHK, k_BTGK, v_BTGW, segments_BT, scale, chunk)[0]


def _forward(q_BTHK, k_BTGK, v_BTGW, segments_BT, scale, chunk):
    B, T, H, _ = q_BTHK.shape
    G, W = v_BTGW.shape[2:]
    q_nBGXK, k_nBGcK, v_nBGcW = (_chunks(x, chunk, G) for x in (q_BTHK, k_BTGK, v_BTGW))
    seen = _masks(segments_BT, T, chunk)
    n, rows = len(q_nBGXK), (B, G, H // G, chunk)

    def tile(carry, pair):
        out_nBGNcW, lse_nBGNc, sums_BGNcW, total_BGNc, peak_BGNc = carry
        i, j = pair
        logits_BGXc = scale * jnp.matmul(q_nBGXK[i], k_nBGcK[j].swapaxes(2, 3), **_F32)
        logits_BGNcc = jnp.where(seen(i, j), logits_BGXc.reshape(*rows, chunk), MASKED)
        # A query chunk's first tile is the diagonal one: every row sees itself there.
        last_BGNc = jnp.where(i == j, MASKED, peak_BGNc)
        peak_BGNc = jnp.maximum(last_BGNc, logits_BGNcc.max(axis=-1))
        decay_BGNc = jnp.exp(last_BGNc - peak_BGNc)
        weights_BGNcc = jnp.exp(logits_BGNcc - peak_BGNc[..., None])
        total_BGNc = decay_BGNc * total_BGNc + weights_BGNcc.sum(axis=-1)
        weights_BGXc = weights_BGNcc.reshape(B, G, -1, chunk).astype(v_BTGW.dtype)
        new_BGXW = jnp.matmul(weights_BGXc, v_nBGcW[j], **_F32)
        sums_BGNcW = decay_BGNc[..., None] * sums_BGNcW + new_BGXW.reshape(*rows, W)
        # Only a query chunk's last tile leaves its mean; what is written before is overwritten.
        mean_BGNcW = (sums_BGNcW / total_BGNc[..., None]).astype(v_BTGW.dtype)
        out_nBGNcW = _put(out_nBGNcW, mean_BGNcW, i)
        lse_nBGNc = _put(lse_nBGNc, peak_BGNc + jnp.log(total_BGNc), i)
        return (out_nBGNcW, lse_nBGNc, sums_BGNcW, total_BGNc, peak_BGNc), None

    one = jnp.zeros(rows)
    start = (
        jnp.zeros((n, *rows, W), v_BTGW.dtype), jnp.zeros((n, *rows)),
        jnp.zeros((*rows, W)), one, one,
    )  # fmt: skip
    (out_nBGNcW, lse_nBGNc, *_), _ = jax.lax.scan(tile, start, _pairs(n))
    # Named for the training step, which may keep them and compute all else again.
    out_BTHW = checkpoint_name(_joined(out_nBGNcW, T), "attended")
    lse_nBGNc = checkpoint_name(lse_nBGNc, "logsumexp")
    return out_BTHW, (q_BTHK, k_BTGK, v_BTGW, segments_BT, out_BTHW, lse_nBGNc)


def _backward(scale, chunk, saved, grad_BTHW):
    q_BTHK, k_BTGK, v_BTGW, segments_BT, out_BTHW, lse_nBGNc = saved
    B, T, H, _ = q_BTHK.shape
    G, dtype = v_BTGW.shape[2], q_BTHK.dtype
    grad_BTHW = grad_BTHW.astype(dtype)
    # What the softmax's normalisation subtracts from each row of the weights' gradient.
    mean_BTH1 = jnp.sum(grad_BTHW * out_BTHW, axis=-1, keepdims=True, dtype=jnp.float32)
    q_nBGXK, k_nBGcK, v_nBGcW, grad_nBGXW, mean_nBGX1 = (
        _chunks(x, chunk, G) for x in (q_BTHK, k_BTGK, v_BTGW, grad_BTHW, mean_BTH1)
    )
    seen = _masks(segments_BT, T, chunk)
    rows = (B, G, H // G, chunk)

    def tile(carry, pair):
        dq_nBGXK, dk_nBGcK, dv_nBGcW = carry
        i, j = pair
        logits_BGXc = scale * jnp.matmul(q_nBGXK[i], k_nBGcK[j].swapaxes(2, 3), **_F32)
        weights_BGNcc = jnp.exp(logits_BGXc.reshape(*rows, chunk) - lse_nBGNc[i][..., None])
        weights_BGXc = jnp.where(seen(i, j), weights_BGNcc, 0).reshape(logits_BGXc.shape)
        dv_BGcW = jnp.matmul(weights_BGXc.astype(dtype).swapaxes(2, 3), grad_nBGXW[i], **_F32)
        dweights_BGXc = jnp.matmul(grad_nBGXW[i], v_nBGcW[j].swapaxes(2, 3), **_F32)
        dlogits_BGXc = (scale * weights_BGXc * (dweights_BGXc - mean_nBGX1[i])).astype(dtype)
        dq_BGXK = jnp.matmul(dlogits_BGXc, k_nBGcK[j], **_F32)
        dk_BGcK = jnp.matmul(dlogits_BGXc.swapaxes(2, 3), q_nBGXK[i], **_F32)
        return (
            _put(dq_nBGXK, dq_nBGXK[i] + dq_BGXK, i),
            _put(dk_nBGcK, dk_nBGcK[j] + dk_BGcK, j),
            _put(dv_nBGcW, dv_nBGcW[j] + dv_BGcW, j),
        ), None

    start = tuple(jnp.zeros(x.shape) for x in (q_nBGXK, k_nBGcK, v_nBGcW))
    (dq_nBGXK, dk_nBGcK, dv_nBGcW), _ = jax.lax.scan(tile, start, _pairs(len(q_nBGXK)))
    dq_BTHK = _joined(dq_nBGXK.reshape(-1, *rows, q_BTHK.shape[-1]), T)
    dk_BTGK, dv_BTGW = (_joined(x[:, :, :, None], T) for x in (dk_nBGcK, dv_nBGcW))
    return dq_BTHK.astype(dtype), dk_BTGK.astype(dtype), dv_BTGW.astype(dtype), None


_attend.defvjp(_forward, _backward)


def _pairs(n):
    """Query and key chunk of every tile: a query chunk at a time, from the diagonal to key 0."""
    pairs = [(i, j) for i in range(n) for j in range(i, -1, -1)]
    return tuple(jnp.array(pairs, jnp.int32).T)


def _put(stack, item, index):
    return jax.lax.dynamic_update_index_in_dim(stack, item, index, 0)


def _chunks(x_BTHK, chunk, groups):
    """[B, T, H, K] → [n, B, G, N · c, K]: heads before positions, a group's queries in one axis.

    Each product is then a plain batched matmul. T is padded with zeros to n · c: no real position
    sees the padding, which comes later, and its own rows are dropped.
    """
    B, T, H, K = x_BTHK.shape
    x_BTHK = jnp.pad(x_BTHK, ((0, 0), (0, -T % chunk), (0, 0), (0, 0)))
    x_BncGNK = x_BTHK.reshape(B, -1, chunk, groups, H // groups, K)
    x_nBGNcK = x_BncGNK.transpose(1, 0, 3, 4, 2, 5)
    return x_nBGNcK.reshape(*x_nBGNcK.shape[:3], -1, K)


def _joined(x_nBGNcK, T):
    """[n, B, G, N, c, K] → [B, T, H, K], without the padding."""
    n, B, G, N, chunk, K = x_nBGNcK.shape
    return x_nBGNcK.transpose(1, 0, 4, 2, 3, 5).reshape(B, n * chunk, G * N, K)[:, :T]


def _masks(segments_BT, T, chunk):
    """seen(i, j): which queries of chunk i see which keys of chunk j, as a mask of the tile."""
    causal_cc = jnp.tril(jnp.ones((chunk, chunk), bool))
    if segments_BT is None:
        return lambda i, j: causal_cc | (j < i)
    segments_BT = jnp.pad(segments_BT, ((0, 0), (0, -T % chunk)))
    segments_nBc = segments_BT.reshape(len(segments_BT), -1, chunk).swapaxes(0, 1)

    def seen(i, j):
        same_Bcc = segments_nBc[i][:, :, None] == segments_nBc[j][:, None]
        return (same_Bcc & (causal_cc | (j < i)))[:, None, None]

    return seen
