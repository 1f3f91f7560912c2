"""Causal attention of a whole sequence over itself (training and prefill).

B batch  T query positions  S key positions  H heads  G key/value heads  N = H / G
K key width  W value width
"""

import jax
import jax.numpy as jnp

# Finite, so that a row with nothing to see gives a mean and not NaN.
MASKED = -1e30


def causal_attention(q_BTHK, k_BSGK, v_BSGW, *, scale, segments_BT=None):
    """softmax(scale · q kᵀ) v over positions s ≤ t (and of the same segment, if given).

    H query heads share G key/value heads in order: head h reads group h // (H / G). Logits and
    softmax are float32; the output [B, T, H, W] has v's dtype.
    """
    B, T, H, K = q_BTHK.shape
    S, G, W = v_BSGW.shape[1:]
    q_BTGNK = q_BTHK.reshape(B, T, G, H // G, K)
    logits_BGNTS = scale * jnp.einsum(
        "BTGNK,BSGK->BGNTS", q_BTGNK, k_BSGK, preferred_element_type=jnp.float32
    )
    mask_BTS = jnp.tril(jnp.ones((T, S), bool))[None]
    if segments_BT is not None:
        mask_BTS = mask_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])
    logits_BGNTS = jnp.where(mask_BTS[:, None, None], logits_BGNTS, MASKED)
    weights_BGNTS = jax.nn.softmax(logits_BGNTS, axis=-1).astype(v_BSGW.dtype)
    out_BTGNW = jnp.einsum("BGNTS,BSGW->BTGNW", weights_BGNTS, v_BSGW)
    return out_BTGNW.reshape(B, T, H, W)
