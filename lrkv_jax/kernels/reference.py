"""Float32 oracles of the decode kernels, written as their definitions.

Every key and value of every head is built and held, products are at the highest precision, and
the softmax sees all slots at once. Arguments and results are those of the kernel.

B batch  T queries  S cache slots  H heads  G key/value heads  K head width  R residual rank
C latent width  P rope-key width  J = K / 2 frequency pairs
"""

import jax.numpy as jnp

from lrkv_jax.kernels.online import MASKED, first_seen

_EXACT = {"precision": "highest", "preferred_element_type": jnp.float32}


def attention(logits_BTHS, v_BSHW, lengths_B):
    """Masked softmax of float32 logits, and its average of each head's values."""
    T, S = logits_BTHS.shape[1], logits_BTHS.shape[-1]
    seen_BTS = jnp.arange(S) <= first_seen(lengths_B, T)[:, :, None]
    logits_BTHS = jnp.where(seen_BTS[:, :, None], logits_BTHS, MASKED)
    peak_BTH1 = logits_BTHS.max(axis=-1, keepdims=True)
    weights_BTHS = jnp.where(seen_BTS[:, :, None], jnp.exp(logits_BTHS - peak_BTH1), 0)
    total_BTH = weights_BTHS.sum(axis=-1)
    safe_BTH = jnp.where(total_BTH > 0, total_BTH, 1)
    v_BSHW = jnp.where((jnp.arange(S) < lengths_B[:, None])[:, :, None, None], v_BSHW, 0)
    out_BTHW = jnp.einsum("BTHS,BSHW->BTHW", weights_BTHS / safe_BTH[..., None], v_BSHW, **_EXACT)
    lse_BTH = jnp.where(total_BTH > 0, peak_BTH1[..., 0] + jnp.log(safe_BTH), MASKED)
    return out_BTHW, lse_BTH


def grouped_decode(q_BTHK, k_BSGK, v_BSGK, lengths_B, *, scale):
    """Oracle of `lrkv_jax.kernels.grouped_decode`."""
    q_BTHK, k_BSGK, v_BSGK = (a.astype(jnp.float32) for a in (q_BTHK, k_BSGK, v_BSGK))
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (jnp.repeat(a, repeats, axis=2) for a in (k_BSGK, v_BSGK))
    logits_BTHS = scale * jnp.einsum("BTHK,BSHK->BTHS", q_BTHK, k_BSHK, **_EXACT)
    return attention(logits_BTHS, v_BSHK, lengths_B)


def latent_decode(q_latent_BTHC, q_rope_BTHP, latent_BSC, rope_key_BSP, lengths_B, *, scale):
    """Oracle of `lrkv_jax.kernels.latent_decode`."""
    q_BTHX = jnp.concatenate([q_latent_BTHC, q_rope_BTHP], axis=-1).astype(jnp.float32)
    k_BSX = jnp.concatenate([latent_BSC, rope_key_BSP], axis=-1).astype(jnp.float32)
    logits_BTHS = scale * jnp.einsum("BTHX,BSX->BTHS", q_BTHX, k_BSX, **_EXACT)
    v_BSHC = jnp.repeat(latent_BSC.astype(jnp.float32)[:, :, None], q_BTHX.shape[2], axis=2)
    return attention(logits_BTHS, v_BSHC, lengths_B)


def lrkv_decode(
    q_BTHK, k_shared_BSK, v_shared_BSK, residual, inverse_norm_BHS, lengths_B, *, scale
):
    """Oracle of `lrkv_jax.kernels.lrkv_decode`."""
    q_BTHK = q_BTHK.astype(jnp.float32)
    k_BSHK, v_BSHK = (
        jnp.repeat(a.astype(jnp.float32)[:, :, None], q_BTHK.shape[2], axis=2)
        for a in (k_shared_BSK, v_shared_BSK)
    )
    logits_BTHS = jnp.einsum("BTHK,BSHK->BTHS", q_BTHK, k_BSHK, **_EXACT)
    if residual is not None:
        up_HRK = residual.up_value_HRK.astype(jnp.float32)
        R = up_HRK.shape[1]
        rk_BSHR, rv_BSHR = (
            a[..., :R].astype(jnp.float32) for a in (residual.rk_BSHR, residual.rv_BSHR)
        )
        v_BSHK += jnp.einsum("BSHR,HRK->BSHK", rv_BSHR, up_HRK, **_EXACT)
        if residual.q_latent_BTHR is not None:
            q_BTHR = residual.q_latent_BTHR.astype(jnp.float32)
            logits_BTHS += jnp.einsum("BTHR,BSHR->BTHS", q_BTHR, rk_BSHR, **_EXACT)
        else:
            up_HRK = residual.up_key_HRK.astype(jnp.float32)
            x1, x2 = jnp.split(jnp.einsum("BSHR,HRK->BSHK", rk_BSHR, up_HRK, **_EXACT), 2, axis=-1)
            cos_SJ, sin_SJ = jnp.split(residual.angles_SK, 2, axis=-1)
            cos, sin = cos_SJ[:, None], sin_SJ[:, None]
            key_BSHK = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
            logits_BTHS += jnp.einsum("BTHK,BSHK->BTHS", q_BTHK, key_BSHK, **_EXACT)
    if inverse_norm_BHS is not None:
        logits_BTHS *= inverse_norm_BHS[:, None]
    return attention(scale * logits_BTHS, v_BSHK, lengths_B)
