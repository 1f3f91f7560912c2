"""Cached attention for MHA, GQA and MQA: each group of heads reads one key and value head."""

import jax.numpy as jnp

from lrkv_jax.kernels.cached_softmax import cached_softmax


def grouped_decode(q_BTHK, k_BSGK, v_BSGK, positions_BT, *, scale):
    """Attend T new queries, at `positions_BT`, to a cache that already holds them.

    Returns [B, T, H, K] in v's dtype; products accumulate in float32.
    """
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BTGNK = q_BTHK.reshape(B, T, G, H // G, K)
    logits_BGNTS = scale * jnp.einsum(
        "BTGNK,BSGK->BGNTS", q_BTGNK, k_BSGK, preferred_element_type=jnp.float32
    )
    weights_BGNTS = cached_softmax(logits_BGNTS, positions_BT).astype(v_BSGK.dtype)
    return jnp.einsum("BGNTS,BSGK->BTGNK", weights_BGNTS, v_BSGK).reshape(B, T, H, K)
