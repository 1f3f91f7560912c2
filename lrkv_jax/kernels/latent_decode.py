"""Cached attention for absorbed MLA: all heads read one latent and one rope key per token.

B batch  T queries  S cache slots  c slots of a chunk  H heads  C latent width  P rope-key width
"""

import jax.numpy as jnp

from lrkv_jax.kernels import dispatch, online
from lrkv_jax.kernels.split_kv import columns
from lrkv_jax.kernels.split_kv import plan as plans


def latent_decode(
    q_latent_BTHC,
    q_rope_BTHP,
    latent_BSC,
    rope_key_BSP,
    lengths_B,
    *,
    scale,
    pages_BN=None,
    impl="auto",
    bits="fast",
):
    """Attend each sequence's last T tokens, with queries in the latent's space, to the cache.

    logits = scale · (q_latent · latent + q_rope · rope_key); the values are the latents. Lengths,
    pages, `impl`, `bits` and results as in `grouped_decode`, the output [B, T, H, C] still in the
    latent.
    """
    arrays = (q_latent_BTHC, q_rope_BTHP, latent_BSC, rope_key_BSP, pages_BN)
    axes, found = ("BTHC", "BTHP", "BSC", "BSP", "BN"), _plan(*arrays, impl, bits)
    kernel = dispatch.Kernel("latent_decode", _xla, _mosaic)
    return kernel(found, arrays, axes, lengths_B, scale=scale, impl=impl)


def _plan(q_latent_BTHC, q_rope_BTHP, latent_BSC, rope_key_BSP, pages_BN, impl, bits):
    """(plan, None) or (None, reason), for one key head of width C + P."""
    _, T, H, C = q_latent_BTHC.shape
    P = q_rope_BTHP.shape[-1]
    return plans.find(
        latent_BSC.dtype, {"latent width": C, "rope-key width": P}, impl,
        T=T, slots=latent_BSC.shape[1], paged=pages_BN is not None, H=H, G=1, bits=bits,
        key_widths=(C, P) if P else (C,), value_width=C, values_in_keys=True,
    )  # fmt: skip


def _mosaic(
    plan, q_latent_BTHC, q_rope_BTHP, latent_BSC, rope_key_BSP, pages_BN, lengths_B, scale,
    interpret,
):  # fmt: skip
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.split_kv.launch import attend

    T, C = q_latent_BTHC.shape[1], q_latent_BTHC.shape[3]
    queries = [columns.to_columns(plan, q_latent_BTHC.astype(latent_BSC.dtype))]
    operands = {"keys": latent_BSC[:, :, None], "pages": pages_BN}
    if rope_key_BSP.shape[-1]:
        queries.append(columns.to_columns(plan, q_rope_BTHP.astype(latent_BSC.dtype)))
        operands["more_keys"] = rope_key_BSP[:, :, None]
    operands["queries"] = jnp.concatenate(queries, axis=3)
    sums, lse = attend(plan, operands, lengths_B, T=T, scale=scale, interpret=interpret)
    return columns.values_of(plan, sums, T, 0, C), columns.from_columns(plan, lse, T)


def _xla(q_latent_BTHC, q_rope_BTHP, latent_BSC, rope_key_BSP, pages_BN, lengths_B, scale):
    (T, H), S = q_latent_BTHC.shape[1:3], online.slots_of(latent_BSC, pages_BN)
    q_BHTC, q_BHTP = q_latent_BTHC.swapaxes(1, 2), q_rope_BTHP.swapaxes(1, 2)
    f32 = {"preferred_element_type": jnp.float32}
    few = online.few(T * H)
    chunk = online.default_chunk(S, few)

    def logits(index, start):
        latent_BcC = online.slots(latent_BSC, pages_BN, start, chunk)
        rope_key_BcP = online.slots(rope_key_BSP, pages_BN, start, chunk)
        logits_BHTc = online.dots("BHTC,BcC->BHTc", q_BHTC, latent_BcC, few)
        logits_BHTc += online.dots("BHTP,BcP->BHTc", q_BHTP, rope_key_BcP, few)
        return scale * logits_BHTc

    def values(weights_BHTc, start, seen_Bc):
        latent_BcC = online.slots(latent_BSC, pages_BN, start, chunk, seen_Bc)
        weights_BHTc = weights_BHTc.astype(latent_BcC.dtype)
        return (jnp.einsum("BHTc,BcC->BHTC", weights_BHTc, latent_BcC, **f32),)

    (out_BHTC,), lse_BHT = online.attend(logits, values, lengths_B, T=T, S=S, chunk=chunk)
    return out_BHTC.swapaxes(1, 2), lse_BHT.swapaxes(1, 2)
