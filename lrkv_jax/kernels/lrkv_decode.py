"""Cached attention for LRKV from its factored cache; no head's keys or values are ever rebuilt.

The cache of a token at position s holds RoPE(k_shared), v_shared, each head's unrotated latents
rk_h, rv_h, and n_h = 1/rms of head h's full key. Logits, by rope mode, times n_h(s):

    full    q·k_shared + [cos sΘ, sin sΘ] · M_h(q) · rk_h
    shared  q·k_shared + (q̄ B_h) · rk_h             q̄ the query before its rotation
    latent  q·k_shared + rot_R(q̄ B_h) · rk_h        the cached rk_h rotated in R dimensions

In `full`, M_h(q) carries RoPE across the factor B_h. For frequency pair j, with (a_j, b_j) the two
halves of the rotated query and B_j, B_j' the matching columns of B_h, its rows are
a_j B_j + b_j B_j' (for cos) and b_j B_j − a_j B_j' (for sin): the dot product of q with
RoPE(B_h rk_h), sorted by cos and sin.

J = K / 2 frequency pairs  c cos or sin
"""

import jax
import jax.numpy as jnp

from lrkv_jax.kernels.cached_softmax import cached_softmax


def mix_query(q_BTHK, b_HRK):
    """M_h(q) [B, T, H, K, R]: rows for cos, then rows for sin, of the J frequency pairs."""
    a_BTHJ, b_BTHJ = jnp.split(q_BTHK[..., None].astype(jnp.float32), 2, axis=-2)
    first_HJR, second_HJR = jnp.split(b_HRK.astype(jnp.float32).swapaxes(1, 2), 2, axis=1)
    cos_BTHJR = a_BTHJ * first_HJR + b_BTHJ * second_HJR
    sin_BTHJR = b_BTHJ * first_HJR - a_BTHJ * second_HJR
    return jnp.concatenate([cos_BTHJR, sin_BTHJR], axis=-2)


def full_residual_logits(q_BTHK, b_HRK, angles_SK, rk_BSHR, *, chunk=512):
    """[cos sΘ, sin sΘ] · M_h(q) · rk_h(s): what the rotated residual adds to each logit.

    angles_SK is [cos, sin] of each slot's position. The product angles · M is a query's view of
    `chunk` slots at a time, so that it stays small beside the cache. Returns float32 [B, H, T, S].
    """
    mix_BTHKR = mix_query(q_BTHK, b_HRK).astype(rk_BSHR.dtype)
    S = rk_BSHR.shape[1]

    def some(angles_sK, rk_BsHR):
        view_BTHsR = jnp.einsum("sK,BTHKR->BTHsR", angles_sK.astype(mix_BTHKR.dtype), mix_BTHKR)
        return jnp.einsum(
            "BTHsR,BsHR->BHTs", view_BTHsR, rk_BsHR, preferred_element_type=jnp.float32
        )

    if S <= chunk:
        return some(angles_SK, rk_BSHR)
    whole = S - S % chunk
    starts = jnp.arange(0, whole, chunk)
    pieces_NBHTs = jax.lax.map(
        lambda start: some(
            jax.lax.dynamic_slice_in_dim(angles_SK, start, chunk, 0),
            jax.lax.dynamic_slice_in_dim(rk_BSHR, start, chunk, 1),
        ),
        starts,
    )
    logits = jnp.moveaxis(pieces_NBHTs, 0, -2)
    logits = logits.reshape(*logits.shape[:-2], whole)
    if whole < S:
        logits = jnp.concatenate([logits, some(angles_SK[whole:], rk_BSHR[:, whole:])], axis=-1)
    return logits


def latent_residual_logits(q_latent_BTHR, rk_BSHR):
    """q_latent · rk_h(s), for the modes whose residual factors as the paper prints it."""
    return jnp.einsum("BTHR,BSHR->BHTS", q_latent_BTHR, rk_BSHR, preferred_element_type=jnp.float32)


def lrkv_decode(
    q_BTHK,
    k_shared_BSK,
    v_shared_BSK,
    residual_logits_BHTS,
    rv_BSHR,
    b_value_HRK,
    inverse_norm_BHS,
    positions_BT,
    *,
    scale,
):
    """Attend T new queries to the factored cache, which already holds their tokens.

    `residual_logits_BHTS`, `rv_BSHR` and `b_value_HRK` are None at rank 0, `inverse_norm_BHS`
    without QK-norm. Returns [B, T, H, K] in v's dtype; products accumulate in float32.
    """
    f32 = {"preferred_element_type": jnp.float32}
    logits_BHTS = jnp.einsum("BTHK,BSK->BHTS", q_BTHK, k_shared_BSK, **f32)
    if residual_logits_BHTS is not None:
        logits_BHTS += residual_logits_BHTS
    if inverse_norm_BHS is not None:
        logits_BHTS *= inverse_norm_BHS[:, :, None, :]
    weights_BHTS = cached_softmax(scale * logits_BHTS, positions_BT).astype(v_shared_BSK.dtype)
    # Values first: in the other order XLA's CPU backend has no bfloat16 product for this shape.
    out_BTHK = jnp.einsum("BSK,BHTS->BTHK", v_shared_BSK, weights_BHTS, **f32)
    if rv_BSHR is not None:
        # (a · rv) Bᵀ: values carry no rotation, so the paper's equation holds as printed.
        mean_BTHR = jnp.einsum("BHTS,BSHR->BTHR", weights_BHTS, rv_BSHR, **f32)
        out_BTHK += jnp.einsum("BTHR,HRK->BTHK", mean_BTHR, b_value_HRK.astype(jnp.float32))
    return out_BTHK.astype(v_shared_BSK.dtype)
