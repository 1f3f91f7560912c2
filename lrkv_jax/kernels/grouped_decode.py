"""Cached attention for MHA, GQA and MQA: each group of heads reads one key and value head.

B batch  T queries  S cache slots  c slots of a chunk  H heads  G key/value heads  N = H / G
K head width
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lrkv_jax.kernels import dispatch, online
from lrkv_jax.kernels.gpu import columns
from lrkv_jax.kernels.gpu import plan as plans
from lrkv_jax.kernels.int8 import Int8Rows


def grouped_decode(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"] | Int8Rows,
    v_BSGK: Float[Array, "B S G K"] | Int8Rows,
    lengths_B: Int[Array, "B"],
    *,
    scale: float,
    pages_BN: Int[Array, "B N"] | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Attend each sequence's last T tokens to a cache that already holds them.

    `lengths_B` counts the tokens of each sequence in the cache, the T queries' included; query
    t sees slots up to `lengths_B` − T + t, the last `window` of them if that is given, and slots
    past the length are never used.

    With a page table `pages_BN` (int32) the cache is a pool of pages, [P, 64, G, K]: slot s of
    sequence b is row s % 64 of page `pages_BN`[b, s // 64]. Entries past a sequence's last page
    may be any page's, and what other pages hold is never used.

    Returns outputs and log-sum-exp (arXiv 1805.02867), both float32: 0 and −1e30 for a query that
    sees nothing. On a GPU the results of a sequence depend, to the last bit, only on its length and
    cache. `impl` is one of `dispatch.IMPLEMENTATIONS`; raises `LrkvError` for another, and for one
    that cannot run.
    """
    arrays, axes = (q_BTHK, k_BSGK, v_BSGK, pages_BN), ("BTHK", "BSGK", "BSGK", "BN")
    found = _plan(q_BTHK, k_BSGK, pages_BN, impl)
    return dispatch.run(
        "grouped_decode", _xla, _mosaic, found, arrays, axes, lengths_B,
        scale=scale, impl=impl, window=window,
    )  # fmt: skip


def _plan(q_BTHK, k_BSGK, pages_BN, impl):
    """(plan, None), or (None, reason why the Mosaic kernel cannot run)."""
    _, T, H, K = q_BTHK.shape
    slots, G = k_BSGK.shape[1:3]
    return plans.find(
        k_BSGK.dtype, {"head width": K}, impl,
        T=T, slots=slots, paged=pages_BN is not None, H=H, G=G,
        key_widths=(K,), value_width=K,
    )  # fmt: skip


def _mosaic(plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret):
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.gpu.launch import attend

    T, K = q_BTHK.shape[1], q_BTHK.shape[3]
    queries = columns.to_columns(plan, q_BTHK.astype(k_BSGK.dtype))
    operands = {"queries": queries, "keys": k_BSGK, "values": v_BSGK, "pages": pages_BN}
    sums, lse = attend(plan, operands, lengths_B, T=T, scale=scale, interpret=interpret)
    return columns.values_of(plan, sums, T, 0, K), columns.from_columns(plan, lse, T)


def _xla(q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, window=None):
    (B, T, H, K), G = q_BTHK.shape, k_BSGK.shape[2]
    S, groups = online.slots_of(k_BSGK, pages_BN), G
    if whole_rows := 1 < G < H and online.is_small_batch(T * H):
        # On a CPU a product of each group copies the cache, which takes longer than zeros: queries
        # of all heads meet whole rows, a page at a time, and are zero where others' keys are.
        own_GNG1 = jnp.eye(G, dtype=q_BTHK.dtype)[:, None, :, None]
        q_BTHK = (q_BTHK.reshape(B, T, G, H // G, 1, K) * own_GNG1).reshape(B, T, H, G * K)
        groups, chunk, small_batch = 1, min(S, plans.TILE), False
    else:
        small_batch = online.is_small_batch(T * H // G)
        alone = B * G == 1
        chunk = online.default_chunk(S, small_batch, B * G * K, pages_BN, single_sequence=alone)
    q_BGNTK = q_BTHK.reshape(B, T, groups, H // groups, -1).transpose(0, 2, 3, 1, 4)

    def logits(start):
        k_BcGK = online.slots(k_BSGK, pages_BN, start, chunk).reshape(B, chunk, groups, -1)
        return scale * online.dots("BGNTK,BcGK->BGNTc", q_BGNTK, k_BcGK, small_batch)

    def values(weights_BGNTc, start, seen_Bc):
        v_BcGK = online.slots(v_BSGK, pages_BN, start, chunk, seen_Bc)
        v_BcGK = v_BcGK.reshape(B, chunk, groups, -1)
        return (online.averages("BGNTc,BcGK->BGNTK", weights_BGNTc, v_BcGK, small_batch),)

    (out_BGNTK,), lse_BGNT = online.attend(
        logits, values, lengths_B, T=T, S=S, chunk=chunk, window=window
    )
    out_BTHK, lse_BTH = online.by_head(out_BGNTK), online.by_head(lse_BGNT)
    if whole_rows:
        out_BTNKG = jnp.diagonal(out_BTHK.reshape(B, T, G, H // G, G, K), axis1=2, axis2=4)
        out_BTHK = jnp.moveaxis(out_BTNKG, -1, 2).reshape(B, T, H, K)
    return out_BTHK, lse_BTH
