"""Causal attention that keeps a sequence's weights in memory: fastest for short sequences.

Queries are cut into strips, and each strip meets its own prefix of the keys: of the T² logits,
those right of a strip's end are never computed. JAX differentiates it, and keeps the weights.

B batch  T positions  t queries of a strip  S keys of its prefix  H heads  G key/value heads
N = H / G  X = N · t  K key width  W value width
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lrkv_jax.kernels.online import MASKED

# On two CPU cores, T = 256, forward and backward: 0.76 of the time of one strip of 256.
STRIP = 64


def causal_attention(q_BTHK, k_BTGK, v_BTGW, *, scale, segments_BT=None, width=STRIP):
    """`lrkv_jax.kernels.flash.causal_attention`, in strips of `width` queries."""
    B, T, H, K = q_BTHK.shape
    G, W = v_BTGW.shape[2:]
    # Heads before positions, a group's queries in one long axis: each product is then a plain
    # batched matmul. On a CPU this takes 0.55 of the time of einsums over [B, T, H, K].
    q_BGNTK = q_BTHK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGKT, v_BGTW = k_BTGK.transpose(0, 2, 3, 1), v_BTGW.swapaxes(1, 2)

    def strip(start):
        end = min(start + width, T)
        rows = (B, G, H // G, end - start)
        q_BGXK = q_BGNTK[:, :, :, start:end].reshape(B, G, -1, K)
        logits_BGXS = scale * jnp.matmul(
            q_BGXK, k_BGKT[..., :end], preferred_element_type=jnp.float32
        )
        seen_BtS = (jnp.arange(end) <= jnp.arange(start, end)[:, None])[None]
        if segments_BT is not None:
            seen_BtS &= segments_BT[:, start:end, None] == segments_BT[:, None, :end]
        logits_BGNtS = jnp.where(seen_BtS[:, None, None], logits_BGXS.reshape(*rows, end), MASKED)
        peak_BGNt1 = jax.lax.stop_gradient(logits_BGNtS.max(axis=-1, keepdims=True))
        weights_BGXS = jnp.exp(logits_BGNtS - peak_BGNt1).reshape(logits_BGXS.shape)
        total_BGX1 = weights_BGXS.sum(axis=-1, keepdims=True)
        # Dividing W columns after the product, not S columns before it.
        sums_BGXW = jnp.matmul(
            weights_BGXS.astype(v_BTGW.dtype), v_BGTW[:, :, :end],
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (sums_BGXW / total_BGX1).astype(v_BTGW.dtype).reshape(*rows, W)

    out_BGNTW = jnp.concatenate([strip(start) for start in range(0, T, width)], axis=3)
    out_BTHW = out_BGNTW.transpose(0, 3, 1, 2, 4).reshape(B, T, H, W)
    return checkpoint_name(out_BTHW, "attended")
