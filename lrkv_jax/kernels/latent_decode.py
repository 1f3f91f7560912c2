"""Cached attention to latents that are read once, as key and as value.

All heads read one latent c per token, and heads or groups of them may have latents r of their own
beside it. The cache holds both unrotated. Logits of a position s are n_h(s) times the sum of

    c, alone      q·c                                    MLA `decoupled`, which adds q'·k', its rope
                                                         key
       rotated    q·RoPE_C(c)                            MLA `latent`, tied LRKV: a tile is rotated
                                                         once, for all heads
       in keys    [cos sΘ, sin sΘ] · M_h(q) · c          MLA `full`
    r, alone      q''·r                                  MLA `decoupled`, tied LRKV `shared`
       rotated    q''·RoPE_R(r)                          MLA `latent`, tied LRKV `latent`
       in keys    [cos sΘ, sin sΘ] · M_h(q) · r          MLA `full`, tied LRKV `full`

where q and q'' are queries in the latents' spaces. The values are the latents. M_h(q) carries the
rotated query and RoPE across the factor that makes keys (`lrkv_jax.kernels.lrkv_decode`), and n_h
is 1/rms of head h's key, or 1.

B batch  T queries  S cache slots  c slots of a chunk  H heads  G groups of them  K head width
C latent width  R width of a group's own latents  P rope-key width
X width of a query: C, in mode `full` K  J = C // 2 frequency pairs
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lrkv_jax.kernels import angles, dispatch, online
from lrkv_jax.kernels.gpu import columns
from lrkv_jax.kernels.gpu import plan as plans


class Rotation(NamedTuple):
    """What rotates keys as they are read: [cos, sin] of each slot's position, and the factors.

    The angles are of C // 2 pairs where the latent itself is rotated. Where keys are, they are of
    K / 2, and there is `up_key_CGK`, of heads or groups of them. `inverse_norm_BGS` is float32, or
    None.
    """

    angles_SK: Any
    up_key_CGK: Any = None
    inverse_norm_BGS: Any = None


class Private(NamedTuple):
    """Latents [B, S, G, R'] of groups of heads, perhaps padded: R ≤ R'.

    Queries meet them as `q_BTHR`, alone or, with [cos, sin] of R // 2 pairs, rotated there; or they
    are rotated in the keys that `up_key_GRK` makes, by `Rotation.angles_SK`.
    """

    latent_BSGR: Any
    q_BTHR: Any = None
    angles_SR: Any = None
    up_key_GRK: Any = None


ROTATION_AXES = Rotation("SK", "CGK", "BGS")
PRIVATE_AXES = Private("BSGR", "BTHR", "SR", "GRK")


def latent_decode(
    q_BTHX,
    q_rope_BTHP,
    latent_BSC,
    rope_key_BSP,
    rotation,
    private,
    lengths_B,
    *,
    scale,
    frequencies_J=None,
    pages_BN=None,
    impl="auto",
    bits="fast",
):
    """Attend each sequence's last T tokens to the cache, which already holds them.

    `rotation` is None in mode `decoupled`, and the rope query and key in the others; `private` is
    None without latents of single heads. `q_BTHX` is in the latent's space, rotated there if the
    latent is; where keys are, it is each head's rotated query, K wide, and `frequencies_J` are the
    angles per position that rotated it (None: RoPE's own). With groups, inverse norms are the
    groups'. Lengths, pages, `impl`, `bits` and results as in `grouped_decode`, the output still in
    the latents: [B, T, H, C + R'].
    """
    if private is not None:
        width = private.latent_BSGR.shape[3]
        private = private._replace(
            q_BTHR=online.padded(private.q_BTHR, 3, width),
            up_key_GRK=online.padded(private.up_key_GRK, 1, width),
        )
    arrays = (q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, pages_BN)
    axes = (
        "BTHX", "BTHP", "BSC", "BSP", rotation and ROTATION_AXES, private and PRIVATE_AXES, "BN"
    )  # fmt: skip
    kernel = dispatch.Kernel("latent_decode", _xla, _mosaic)
    return kernel(
        _plan(*arrays, impl, bits), arrays, axes, lengths_B,
        scale=scale, impl=impl, frequencies_J=frequencies_J,
    )  # fmt: skip


def _plan(q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, pages_BN, impl, bits):
    """(plan, None) or (None, reason), for one key head of width C + P."""
    (_, T, H, _), C = q_BTHX.shape, latent_BSC.shape[-1]
    P = 0 if rotation is not None else q_rope_BTHP.shape[-1]
    if private is not None:
        return None, "it reads one latent of all heads, and none of their own"
    if rotation is not None and rotation.up_key_CGK is not None:
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
    plan, q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, pages_BN, lengths_B,
    scale, interpret,
):  # fmt: skip
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.gpu.launch import attend

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
    private,
    pages_BN,
    lengths_B,
    scale,
    frequencies_J=None,
):
    G = q_BTHX.shape[2]
    if private is not None:
        G = private.latent_BSGR.shape[2]
    elif rotation is not None and rotation.up_key_CGK is not None:
        G = rotation.up_key_CGK.shape[1]
    repeats = q_BTHX.shape[2] // G
    if repeats > 1:
        # A group's heads are further queries of one head.
        q_BTHX = online.as_queries(q_BTHX, G)
        if q_rope_BTHP is not None:
            q_rope_BTHP = online.as_queries(q_rope_BTHP, G)
        if private is not None and private.q_BTHR is not None:
            private = private._replace(q_BTHR=online.as_queries(private.q_BTHR, G))
    (B, T, H, _), S = q_BTHX.shape, online.slots_of(latent_BSC, pages_BN)
    q_BHTX = q_BTHX.swapaxes(1, 2)
    few = online.few(T * H)
    widest = latent_BSC.shape[-1]
    if private is not None:
        widest = max(widest, H * private.latent_BSGR.shape[-1])
    chunk = online.default_chunk(S, few, B * widest, alone=B == 1)

    def in_keys(up_HRK, latent_BSHR):
        """Logits [S, B, T, H] of latents that are rotated in the keys that they make."""
        return angles.logits(
            q_BTHX, up_HRK, rotation.angles_SK, latent_BSHR, lengths_B, frequencies_J, pages_BN
        )

    keys = []  # those of each part that is rotated in keys
    if rotation is not None and rotation.up_key_CGK is not None:
        # One head's latents in place of H: they meet every head's M_h(q).
        of_one_BS1C = jax.tree.map(lambda array: array[:, :, None], latent_BSC)
        keys.append(in_keys(rotation.up_key_CGK.swapaxes(0, 1), of_one_BS1C))
    if private is not None and private.up_key_GRK is not None:
        keys.append(in_keys(private.up_key_GRK, private.latent_BSGR))

    def of_common(start):
        key_BcC = online.slots(latent_BSC, pages_BN, start, chunk)
        if rotation is not None:
            angles_cK = jax.lax.dynamic_slice_in_dim(rotation.angles_SK, start, chunk)
            key_BcC = _rotated(key_BcC, angles_cK)
        return online.dots("BHTC,BcC->BHTc", q_BHTX, key_BcC, few)

    def of_rope_key(start):
        rope_key_BcP = online.slots(rope_key_BSP, pages_BN, start, chunk)
        return online.dots("BHTP,BcP->BHTc", q_rope_BTHP.swapaxes(1, 2), rope_key_BcP, few)

    def of_private(start):
        key_BcHR = online.slots(private.latent_BSGR, pages_BN, start, chunk)
        q_BTHR = private.q_BTHR.astype(key_BcHR.dtype)
        if private.angles_SR is not None:
            angles_cR = jax.lax.dynamic_slice_in_dim(private.angles_SR, start, chunk)
            if few and T == 1:  # one query of a key: it is the query that is turned
                q_BTcHR = _turned_back(q_BTHR, angles_cR)
                return online.dots("BTcHR,BcHR->BHTc", q_BTcHR, key_BcHR, few)
            key_BcHR = _rotated(key_BcHR, angles_cR[:, None])
        return online.dots("BTHR,BcHR->BHTc", q_BTHR, key_BcHR, few)

    def logits(index, start):
        parts = [angles.of_slots(rotated_SBTH, start, chunk) for rotated_SBTH in keys]
        if rotation is None or rotation.up_key_CGK is None:
            parts.append(of_common(start))
        if rotation is None:
            parts.append(of_rope_key(start))
        if private is not None and private.q_BTHR is not None:
            parts.append(of_private(start))
        logits_BHTc = sum(parts[1:], parts[0])
        if rotation is not None and rotation.inverse_norm_BGS is not None:
            norm_BHc = online.slots(rotation.inverse_norm_BGS, pages_BN, start, chunk, axis=2)
            logits_BHTc *= norm_BHc[:, :, None]
        return scale * logits_BHTc

    def values(weights_BHTc, start, seen_Bc):
        latent_BcC = online.slots(latent_BSC, pages_BN, start, chunk, seen_Bc)
        common_BHTC = online.averages("BHTc,BcC->BHTC", weights_BHTc, latent_BcC, few)
        if private is None:
            return (common_BHTC,)
        latent_BcHR = online.slots(private.latent_BSGR, pages_BN, start, chunk, seen_Bc)
        return common_BHTC, online.averages("BHTc,BcHR->BHTR", weights_BHTc, latent_BcHR, few)

    sums, lse_BHT = online.attend(logits, values, lengths_B, T=T, S=S, chunk=chunk, repeats=repeats)
    out_BTHX = jnp.concatenate(sums, axis=-1).swapaxes(1, 2)
    return online.as_heads(out_BTHX, repeats), online.as_heads(lse_BHT.swapaxes(1, 2), repeats)


def _rotated(key, angles_cK):
    """Keys [B, c, ..., C] turned by their slots' [cos, sin], but for what is past the pairs."""
    cos_cJ, sin_cJ = jnp.split(angles_cK, 2, axis=-1)
    pairs = cos_cJ.shape[-1]
    x1, x2, rest = jnp.split(key.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
    parts = [x1 * cos_cJ - x2 * sin_cJ, x2 * cos_cJ + x1 * sin_cJ, rest]
    return jnp.concatenate(parts, axis=-1).astype(key.dtype)


def _turned_back(q_BTHR, angles_cR):
    """Queries against each slot's angle, float32: q · RoPE(key) is the result · key.

    This is `angles.turned_back` for many slots at once, and has no halves to join: two products and
    a sum for each value, which XLA makes as it multiplies. The other form takes 1.2 to 1.5 times as
    long.
    """
    cos_cJ, sin_cJ = jnp.split(angles_cR, 2, axis=-1)
    pairs = cos_cJ.shape[-1]
    q1, q2, rest = jnp.split(q_BTHR.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
    same_BT1HR = q_BTHR.astype(jnp.float32)[:, :, None]
    other_BT1HR = jnp.concatenate([q2, q1, jnp.zeros_like(rest)], axis=-1)[:, :, None]
    past = ((0, 0), (0, rest.shape[-1]))
    cos_cR = jnp.pad(jnp.concatenate([cos_cJ, cos_cJ], axis=-1), past, constant_values=1)
    sin_cR = jnp.pad(jnp.concatenate([sin_cJ, -sin_cJ], axis=-1), past)
    return same_BT1HR * cos_cR[:, None] + other_BT1HR * sin_cR[:, None]
