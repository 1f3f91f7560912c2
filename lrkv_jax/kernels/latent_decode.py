"""Cached attention for absorbed MLA: all heads read one latent per token, as key and as value.

The cache of a token at position s holds the unrotated latent c. Logits by rope mode:

    decoupled  q·c + q'·k'               q in the latent's space; k' one rope key beside it
    full       n_h(s) · ([cos sΘ, sin sΘ] · M_h(q) · c)      as LRKV's residual, from one latent
    latent     q·RoPE_C(c)               a tile of latents is rotated once, for all heads

The values are the latents. In `full`, M_h(q) carries the rotated query and RoPE across the factor
W^K_h (`lrkv_jax.kernels.lrkv_decode`), and n_h is 1/rms of head h's key.

B batch  T queries  S cache slots  c slots of a chunk  H heads  K head width  C latent width
P rope-key width  X width of a query: C, in mode `full` K  J = C // 2 frequency pairs
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lrkv_jax.kernels import angles, dispatch, online
from lrkv_jax.kernels.split_kv import columns
from lrkv_jax.kernels.split_kv import plan as plans


class Rotation(NamedTuple):
    """What rotates keys as they are read: [cos, sin] of each slot's position, and `full`'s factors.

    The angles are of C // 2 pairs in mode `latent`. In `full` they are of K / 2, and there are
    `up_key_CHK` and, with QK-norm, `inverse_norm_BHS`, float32.
    """

    angles_SK: Any
    up_key_CHK: Any = None
    inverse_norm_BHS: Any = None


ROTATION_AXES = Rotation("SK", "CHK", "BHS")


def latent_decode(
    q_BTHX,
    q_rope_BTHP,
    latent_BSC,
    rope_key_BSP,
    rotation,
    lengths_B,
    *,
    scale,
    rope_base=10_000.0,
    pages_BN=None,
    impl="auto",
    bits="fast",
):
    """Attend each sequence's last T tokens to the cache, which already holds them.

    `rotation` is None in mode `decoupled`, and the rope query and key in the others. `q_BTHX` is in
    the latent's space, rotated there in `latent`; in `full` it is each head's rotated query, K
    wide. `rope_base` is the base of the angles. Lengths, pages, `impl`, `bits` and results as in
    `grouped_decode`, the output [B, T, H, C] still in the latent.
    """
    arrays = (q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, pages_BN)
    axes = ("BTHX", "BTHP", "BSC", "BSP", rotation and ROTATION_AXES, "BN")
    kernel = dispatch.Kernel("latent_decode", _xla, _mosaic)
    return kernel(
        _plan(*arrays, impl, bits), arrays, axes, lengths_B,
        scale=scale, impl=impl, rope_base=rope_base,
    )  # fmt: skip


def _plan(q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, pages_BN, impl, bits):
    """(plan, None) or (None, reason), for one key head of width C + P."""
    (_, T, H, _), C = q_BTHX.shape, latent_BSC.shape[-1]
    P = 0 if rotation is not None else q_rope_BTHP.shape[-1]
    if rotation is not None and rotation.up_key_CHK is not None:
        return None, "it rebuilds no keys from a latent of all heads"
    if rotation is not None and C % (2 * plans.WIDTH):
        return None, f"latent width = {C}: the kernel rotates latents of a multiple of 128"
    return plans.find(
        latent_BSC.dtype, {"latent width": C, "rope-key width": P}, impl,
        T=T, slots=latent_BSC.shape[1], paged=pages_BN is not None, H=H, G=1, bits=bits,
        key_widths=(C, P) if P else (C,), value_width=C, values_in_keys=True,
        turned=rotation is not None,
    )  # fmt: skip


def _mosaic(
    plan, q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, pages_BN, lengths_B, scale,
    interpret,
):  # fmt: skip
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.split_kv.launch import attend

    T, C = q_BTHX.shape[1], latent_BSC.shape[-1]
    dtype = latent_BSC.dtype
    if plan.turned and dtype.itemsize == 2:
        # Rotated keys are rounded once more: to 11 bits in place of 8. They and the queries, normed
        # over C, are far below float16's largest, 65,504.
        dtype = jnp.float16
    queries = [columns.to_columns(plan, q_BTHX.astype(dtype))]
    operands = {"keys": latent_BSC[:, :, None], "pages": pages_BN}
    if rotation is not None:
        operands |= _turning(rotation.angles_SK, dtype)
    elif rope_key_BSP.shape[-1]:
        queries.append(columns.to_columns(plan, q_rope_BTHP.astype(latent_BSC.dtype)))
        operands["more_keys"] = rope_key_BSP[:, :, None]
    operands["queries"] = jnp.concatenate(queries, axis=3)
    sums, lse = attend(plan, operands, lengths_B, T=T, scale=scale, interpret=interpret)
    return columns.values_of(plan, sums, T, 0, C), columns.from_columns(plan, lse, T)


def _turning(angles_SK, dtype):
    """Angles of a tile's tokens, and of the first token of each tile, in blocks of 64 pairs."""
    S, C = angles_SK.shape
    angles_SX = angles_SK.reshape(S, 2, C // (2 * plans.WIDTH), plans.WIDTH)
    in_tile = angles_SX[jnp.minimum(jnp.arange(plans.TILE), S - 1)]
    return {
        "in_tile": jnp.moveaxis(in_tile, 0, 2).astype(dtype),
        "tile_angles": angles_SX[:: plans.TILE],
    }


def _xla(
    q_BTHX,
    q_rope_BTHP,
    latent_BSC,
    rope_key_BSP,
    rotation,
    pages_BN,
    lengths_B,
    scale,
    rope_base=10_000.0,
):
    (B, T, H, _), S = q_BTHX.shape, online.slots_of(latent_BSC, pages_BN)
    q_BHTX = q_BTHX.swapaxes(1, 2)
    few = online.few(T * H)
    chunk = online.default_chunk(S, few, B * latent_BSC.shape[-1])
    full = rotation is not None and rotation.up_key_CHK is not None
    if full:
        # One head's latents in place of H: they meet every head's M_h(q).
        latent_BS1C = latent_BSC[:, :, None]
        up_HCK = rotation.up_key_CHK.swapaxes(0, 1)
        rotated_SBTH = angles.logits(
            q_BTHX, up_HCK, rotation.angles_SK, latent_BS1C, lengths_B, rope_base,
            pages_BN,
        )  # fmt: skip

    def logits(index, start):
        if full:
            rotated_cBTH = jax.lax.dynamic_slice_in_dim(rotated_SBTH, start, chunk)
            logits_BHTc = rotated_cBTH.transpose(1, 3, 2, 0)
            if rotation.inverse_norm_BHS is not None:
                norms = rotation.inverse_norm_BHS
                norm_BHc = online.slots(norms, pages_BN, start, chunk, axis=2)
                logits_BHTc *= norm_BHc[:, :, None]
            return scale * logits_BHTc
        key_BcC = online.slots(latent_BSC, pages_BN, start, chunk)
        if rotation is not None:
            angles_cK = jax.lax.dynamic_slice_in_dim(rotation.angles_SK, start, chunk)
            key_BcC = _rotated(key_BcC, angles_cK)
        logits_BHTc = online.dots("BHTC,BcC->BHTc", q_BHTX, key_BcC, few)
        if rotation is None:
            q_BHTP = q_rope_BTHP.swapaxes(1, 2)
            rope_key_BcP = online.slots(rope_key_BSP, pages_BN, start, chunk)
            logits_BHTc += online.dots("BHTP,BcP->BHTc", q_BHTP, rope_key_BcP, few)
        return scale * logits_BHTc

    def values(weights_BHTc, start, seen_Bc):
        latent_BcC = online.slots(latent_BSC, pages_BN, start, chunk, seen_Bc)
        return (online.averages("BHTc,BcC->BHTC", weights_BHTc, latent_BcC, few),)

    (out_BHTC,), lse_BHT = online.attend(logits, values, lengths_B, T=T, S=S, chunk=chunk)
    return out_BHTC.swapaxes(1, 2), lse_BHT.swapaxes(1, 2)


def _rotated(key_BcC, angles_cK):
    """Keys turned by their slots' [cos, sin]; an odd last coordinate is left alone."""
    cos_cJ, sin_cJ = jnp.split(angles_cK, 2, axis=-1)
    pairs = cos_cJ.shape[-1]
    x1, x2, rest = jnp.split(key_BcC.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
    parts = [x1 * cos_cJ - x2 * sin_cJ, x2 * cos_cJ + x1 * sin_cJ, rest]
    return jnp.concatenate(parts, axis=-1).astype(key_BcC.dtype)
