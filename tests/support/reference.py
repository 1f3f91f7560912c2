"""Oracles of the decode kernels, written as their definitions.

Every key and value of every head is built and held, products are at the highest precision, and
the softmax sees all slots at once. Arguments and results are those of the kernel; the arithmetic is
float32's, or float64's where the arguments are.

B batch  T queries  S cache slots  H heads  G key/value heads  K head width  R residual rank
C latent width  P rope-key width  X width of a query, in the latent or a head
"""

from functools import partial

import jax
import jax.numpy as jnp

from lrkv_jax.kernels.online import MASKED, first_seen

einsum = partial(jnp.einsum, precision="highest")


def attention(logits_BTHS, v_BSHW, lengths_B):
    """Masked softmax of logits, and its average of each head's values."""
    T, S = logits_BTHS.shape[1], logits_BTHS.shape[-1]
    seen_BTS = jnp.arange(S) <= first_seen(lengths_B, T)[:, :, None]
    logits_BTHS = jnp.where(seen_BTS[:, :, None], logits_BTHS, MASKED)
    peak_BTH1 = logits_BTHS.max(axis=-1, keepdims=True)
    weights_BTHS = jnp.where(seen_BTS[:, :, None], jnp.exp(logits_BTHS - peak_BTH1), 0)
    total_BTH = weights_BTHS.sum(axis=-1)
    safe_BTH = jnp.where(total_BTH > 0, total_BTH, 1)
    v_BSHW = jnp.where((jnp.arange(S) < lengths_B[:, None])[:, :, None, None], v_BSHW, 0)
    out_BTHW = einsum("BTHS,BSHW->BTHW", weights_BTHS / safe_BTH[..., None], v_BSHW)
    lse_BTH = jnp.where(total_BTH > 0, peak_BTH1[..., 0] + jnp.log(safe_BTH), MASKED)
    return out_BTHW, lse_BTH


def grouped_decode(q_BTHK, k_BSGK, v_BSGK, lengths_B, *, scale):
    """Oracle of `lrkv_jax.kernels.grouped_decode`."""
    q_BTHK, k_BSGK, v_BSGK = _exact((q_BTHK, k_BSGK, v_BSGK))
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (jnp.repeat(a, repeats, axis=2) for a in (k_BSGK, v_BSGK))
    logits_BTHS = scale * einsum("BTHK,BSHK->BTHS", q_BTHK, k_BSHK)
    return attention(logits_BTHS, v_BSHK, lengths_B)


def latent_decode(
    q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, lengths_B, *, scale
):
    """Oracle of `lrkv_jax.kernels.latent_decode`."""
    q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP = _exact(
        (q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP)
    )
    H = q_BTHX.shape[2]
    rotation, private = (each and _of_each_head(_exact(each), H) for each in (rotation, private))
    common_BSHC = jnp.repeat(latent_BSC[:, :, None], H, axis=2)
    values = [common_BSHC] if private is None else [common_BSHC, private.latent_BSGR]
    if rotation is None:
        queries = [q_BTHX, q_rope_BTHP]
        keys = [common_BSHC, jnp.repeat(rope_key_BSP[:, :, None], H, axis=2)]
        if private is not None:
            queries.append(private.q_BTHR)
            keys.append(private.latent_BSGR[..., : private.q_BTHR.shape[-1]])
        q_BTHX, k_BSHX = (jnp.concatenate(parts, axis=-1) for parts in (queries, keys))
    else:
        k_BSHX = einsum("BSC,CHK->BSHK", latent_BSC, rotation.up_key_CGK)
        if private is not None:
            r_BSHR = private.latent_BSGR[..., : private.up_key_GRK.shape[1]]
            k_BSHX += einsum("BSHR,HRK->BSHK", r_BSHR, private.up_key_GRK)
        k_BSHX = _rotated(k_BSHX, rotation.angles_SK)
    logits_BTHS = scale * einsum("BTHX,BSHX->BTHS", q_BTHX, k_BSHX)
    if rotation is not None and rotation.inverse_norm_BGS is not None:
        logits_BTHS *= rotation.inverse_norm_BGS[:, None]
    return attention(logits_BTHS, jnp.concatenate(values, axis=-1), lengths_B)


def lrkv_decode(
    q_BTHK, k_shared_BSK, v_shared_BSK, residual, inverse_norm_BGS, lengths_B, *, scale
):
    """Oracle of `lrkv_jax.kernels.lrkv_decode`."""
    q_BTHK, *shared, residual = _exact((q_BTHK, k_shared_BSK, v_shared_BSK, residual))
    H = q_BTHK.shape[2]
    k_BSHK, v_BSHK = (jnp.repeat(a[:, :, None], H, axis=2) for a in shared)
    logits_BTHS = einsum("BTHK,BSHK->BTHS", q_BTHK, k_BSHK)
    if residual is not None:
        residual = _of_each_head(residual, H)
        R = residual.up_value_GRK.shape[1]
        rk_BSHR, rv_BSHR = residual.rk_BSGR[..., :R], residual.rv_BSGR[..., :R]
        v_BSHK += einsum("BSHR,HRK->BSHK", rv_BSHR, residual.up_value_GRK)
        if residual.q_latent_BTHR is not None:
            logits_BTHS += einsum("BTHR,BSHR->BTHS", residual.q_latent_BTHR, rk_BSHR)
        else:
            key_BSHK = einsum("BSHR,HRK->BSHK", rk_BSHR, residual.up_key_GRK)
            key_BSHK = _rotated(key_BSHK, residual.angles_SK)
            logits_BTHS += einsum("BTHK,BSHK->BTHS", q_BTHK, key_BSHK)
    if inverse_norm_BGS is not None:
        repeats = H // inverse_norm_BGS.shape[1]
        logits_BTHS *= jnp.repeat(inverse_norm_BGS, repeats, axis=1)[:, None]
    return attention(scale * logits_BTHS, v_BSHK, lengths_B)


def _exact(arrays):
    """Arrays in float32 at least."""
    return jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), arrays)


def _of_each_head(named, heads):
    """A named tuple whose arrays with a letter G are repeated, each group's for its heads."""
    repeated = {}
    for name, array in named._asdict().items():
        axis = name.rpartition("_")[2].find("G")
        if array is not None and axis >= 0:
            repeated[name] = jnp.repeat(array, heads // array.shape[axis], axis=axis)
    return named._replace(**repeated)


def _rotated(key_BSHK, angles_SK):
    """Keys turned by [cos, sin] of their slots' positions; an odd last coordinate is left alone."""
    cos, sin = jnp.split(angles_SK[:, None], 2, axis=-1)
    x1, x2, rest = jnp.split(key_BSHK, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)
