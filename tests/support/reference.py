"""Float32 oracles of the decode kernels, written as their definitions.

Every key and value of every head is built and held, products are at the highest precision, and
the softmax sees all slots at once. Arguments and results are those of the kernel.

B batch  T queries  S cache slots  H heads  G key/value heads  K head width  R residual rank
C latent width  P rope-key width  X width of a query, in the latent or a head
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


def latent_decode(
    q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, lengths_B, *, scale
):
    """Oracle of `lrkv_jax.kernels.latent_decode`."""
    heads = q_BTHX.shape[2]
    private, rotation = (each and _to_each_head(each, heads) for each in (private, rotation))
    q_BTHX, latent_BSC = (a.astype(jnp.float32) for a in (q_BTHX, latent_BSC))
    k_BSGX = v_BSGX = latent_BSC[:, :, None]
    if rotation is None:
        q_BTHX = jnp.concatenate([q_BTHX, q_rope_BTHP.astype(jnp.float32)], axis=-1)
        rope_key_BSGP = rope_key_BSP.astype(jnp.float32)[:, :, None]
        k_BSGX = jnp.concatenate([k_BSGX, rope_key_BSGP], axis=-1)
    else:
        up_CHK = rotation.up_key_CGK.astype(jnp.float32)
        k_BSGX = jnp.einsum("BSC,CHK->BSHK", latent_BSC, up_CHK, **_EXACT)
        if private is not None and private.up_key_GRK is not None:
            up_HRK = private.up_key_GRK.astype(jnp.float32)
            r_BSHR = private.latent_BSGR[..., : up_HRK.shape[1]].astype(jnp.float32)
            k_BSGX = k_BSGX + jnp.einsum("BSHR,HRK->BSHK", r_BSHR, up_HRK, **_EXACT)
        k_BSGX = _rotated(k_BSGX, rotation.angles_SK)

    def to_heads(array_BSGX):
        shape = (*array_BSGX.shape[:2], q_BTHX.shape[2], array_BSGX.shape[3])
        return jnp.broadcast_to(array_BSGX, shape)

    k_BSHX, v_BSHX = to_heads(k_BSGX), to_heads(v_BSGX)
    if private is not None:
        r_BSHR = private.latent_BSGR.astype(jnp.float32)
        v_BSHX = jnp.concatenate([v_BSHX, r_BSHR], axis=-1)
        if private.q_BTHR is not None:
            q_BTHR = private.q_BTHR.astype(jnp.float32)
            q_BTHX = jnp.concatenate([q_BTHX, q_BTHR], axis=-1)
            r_BSHR = r_BSHR[..., : q_BTHR.shape[-1]]
            k_BSHX = jnp.concatenate([k_BSHX, r_BSHR], axis=-1)
    logits_BTHS = jnp.einsum("BTHX,BSHX->BTHS", q_BTHX, k_BSHX, **_EXACT)
    if rotation is not None and rotation.inverse_norm_BGS is not None:
        logits_BTHS *= rotation.inverse_norm_BGS[:, None]
    return attention(scale * logits_BTHS, v_BSHX, lengths_B)


def _to_each_head(named, heads):
    """A named tuple whose arrays with a letter G are repeated, each group's for its heads."""
    repeated = {}
    for name, array in named._asdict().items():
        axis = name.rpartition("_")[2].find("G")
        if array is not None and axis >= 0:
            repeated[name] = jnp.repeat(array, heads // array.shape[axis], axis=axis)
    return named._replace(**repeated)


def lrkv_decode(
    q_BTHK, k_shared_BSK, v_shared_BSK, residual, inverse_norm_BGS, lengths_B, *, scale
):
    """Oracle of `lrkv_jax.kernels.lrkv_decode`."""
    q_BTHK = q_BTHK.astype(jnp.float32)
    k_BSHK, v_BSHK = (
        jnp.repeat(a.astype(jnp.float32)[:, :, None], q_BTHK.shape[2], axis=2)
        for a in (k_shared_BSK, v_shared_BSK)
    )
    logits_BTHS = jnp.einsum("BTHK,BSHK->BTHS", q_BTHK, k_BSHK, **_EXACT)
    if residual is not None:
        residual = _to_each_head(residual, q_BTHK.shape[2])
        up_HRK = residual.up_value_GRK.astype(jnp.float32)
        R = up_HRK.shape[1]
        rk_BSHR, rv_BSHR = (
            a[..., :R].astype(jnp.float32) for a in (residual.rk_BSGR, residual.rv_BSGR)
        )
        v_BSHK += jnp.einsum("BSHR,HRK->BSHK", rv_BSHR, up_HRK, **_EXACT)
        if residual.q_latent_BTHR is not None:
            q_BTHR = residual.q_latent_BTHR.astype(jnp.float32)
            logits_BTHS += jnp.einsum("BTHR,BSHR->BTHS", q_BTHR, rk_BSHR, **_EXACT)
        else:
            up_HRK = residual.up_key_GRK.astype(jnp.float32)
            key_BSHK = jnp.einsum("BSHR,HRK->BSHK", rk_BSHR, up_HRK, **_EXACT)
            key_BSHK = _rotated(key_BSHK, residual.angles_SK)
            logits_BTHS += jnp.einsum("BTHK,BSHK->BTHS", q_BTHK, key_BSHK, **_EXACT)
    if inverse_norm_BGS is not None:
        repeats = q_BTHK.shape[2] // inverse_norm_BGS.shape[1]
        logits_BTHS *= jnp.repeat(inverse_norm_BGS, repeats, axis=1)[:, None]
    return attention(scale * logits_BTHS, v_BSHK, lengths_B)


def _rotated(key_BSHK, angles_SK):
    """Keys turned by [cos, sin] of their slots' positions; an odd last coordinate is left alone."""
    cos, sin = jnp.split(angles_SK[:, None], 2, axis=-1)
    x1, x2, rest = jnp.split(key_BSHK, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)
