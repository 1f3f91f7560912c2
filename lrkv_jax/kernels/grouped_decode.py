"""Cached attention for MHA, GQA and MQA: each group of heads reads one key and value head.

B batch  T queries  S cache slots  c slots of a chunk  H heads  G key/value heads  N = H / G
K head width
"""

import jax.numpy as jnp

from lrkv_jax.kernels import dispatch, online
from lrkv_jax.kernels.split_kv import columns
from lrkv_jax.kernels.split_kv import plan as plans


def grouped_decode(q_BTHK, k_BSGK, v_BSGK, lengths_B, *, scale, impl="auto"):
    """Attend each sequence's last T tokens to a cache that already holds them.

    `lengths_B` counts the tokens of each sequence in the cache, the T queries' own included; query
    t sees slots up to `lengths_B` − T + t, and slots past the length are never used.
    `impl` is one of `dispatch.IMPLEMENTATIONS`. Returns float32 outputs [B, T, H, K] and
    log-sum-exp [B, T, H]: 0 and −1e30 for a query that sees nothing.
    """
    arrays, axes = (q_BTHK, k_BSGK, v_BSGK), ("BTHK", "BSGK", "BSGK")
    found = _plan(q_BTHK, k_BSGK, impl)
    kernel = dispatch.Kernel("grouped_decode", _xla, _mosaic)
    return kernel(found, arrays, axes, lengths_B, scale=scale, impl=impl)


def _plan(q_BTHK, k_BSGK, impl):
    """(plan, None), or (None, reason why the Mosaic kernel cannot run)."""
    _, T, H, K = q_BTHK.shape
    S, G = k_BSGK.shape[1:3]
    return plans.find(
        k_BSGK.dtype, {"head width": K}, impl,
        T=T, S=S, H=H, G=G, key_widths=(K,), value_width=K,
    )  # fmt: skip


def _mosaic(plan, q_BTHK, k_BSGK, v_BSGK, lengths_B, scale, interpret):
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.split_kv.launch import attend

    T, K = q_BTHK.shape[1], q_BTHK.shape[3]
    queries = columns.to_columns(plan, q_BTHK.astype(k_BSGK.dtype))
    operands = {"queries": queries, "keys": k_BSGK, "values": v_BSGK}
    sums, lse = attend(plan, operands, lengths_B, T=T, scale=scale, interpret=interpret)
    return columns.values_of(plan, sums, T, 0, K), columns.from_columns(plan, lse, T)


def _xla(q_BTHK, k_BSGK, v_BSGK, lengths_B, scale):
    B, T, H, K = q_BTHK.shape
    S, G = k_BSGK.shape[1:3]
    q_BGNTK = q_BTHK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    f32 = {"preferred_element_type": jnp.float32}
    chunk = online.default_chunk(S)

    def logits(index, start):
        k_BcGK = online.slots(k_BSGK, start, chunk)
        return scale * jnp.einsum("BGNTK,BcGK->BGNTc", q_BGNTK, k_BcGK, **f32)

    def values(weights_BGNTc, start, seen_Bc):
        v_BcGK = online.slots(v_BSGK, start, chunk, seen_Bc)
        weights_BGNTc = weights_BGNTc.astype(v_BcGK.dtype)
        return (jnp.einsum("BGNTc,BcGK->BGNTK", weights_BGNTc, v_BcGK, **f32),)

    (out_BGNTK,), lse_BGNT = online.attend(logits, values, lengths_B, T=T, S=S, chunk=chunk)
    return online.by_head(out_BGNTK), online.by_head(lse_BGNT)
