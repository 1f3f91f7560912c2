"""Cached attention for LRKV from its factored cache; no head's keys or values are ever rebuilt.

The cache of a token at position s holds RoPE(k_shared), v_shared, each head's unrotated latents
rk_h, rv_h, and n_h = 1/rms of head h's full key. Logits, by rope mode, times n_h(s):

    full    q·k_shared + [cos sΘ, sin sΘ] · M_h(q) · rk_h
    shared  q·k_shared + (q̄ B_h) · rk_h             q̄ the query before its rotation
    latent  q·k_shared + rot_R(q̄ B_h) · rk_h        the cached rk_h rotated in R dimensions
    none    q·k_shared + (q B_h) · rk_h             nothing is rotated, k_shared neither

In `full`, M_h(q) carries RoPE across the factor B_h. For frequency pair j, with (a_j, b_j) the two
halves of the rotated query and B_j, B_j' the matching columns of B_h, its rows are
a_j B_j + b_j B_j' (for cos) and b_j B_j − a_j B_j' (for sin): the dot product of q with
RoPE(B_h rk_h), sorted by cos and sin.

A position is s = s₀ + i, where s₀ is its chunk's first. RoPE rotates by s₀ and then by i, so q is
rotated back by s₀, and the angles of i = 0, 1, ... are the same for every chunk
(`lrkv_jax.kernels.angles` compresses them).

B batch  T queries  S cache slots  c slots of a chunk  H heads  K head width  R residual rank
J = K / 2 frequency pairs
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lrkv_jax.kernels import angles, dispatch, online
from lrkv_jax.kernels.gpu import columns
from lrkv_jax.kernels.gpu import plan as plans
from lrkv_jax.kernels.int8 import Int8Rows


class Residual(NamedTuple):
    """The residuals of single heads: their cached latents, and the factors that multiply them.

    Or to G groups of them; `q_latent_BTHR` has each query head's. The cached latents [B, S, G, R']
    may be padded: R ≤ R', and keys and values may have different ranks. In mode `full` there are
    `up_key_GRK` and `angles_SK`, [cos, sin] of each slot's position; in the others `q_latent_BTHR`.
    Where angles count from another position than 0, `q_BTHK` is the query rotated as from there.
    """

    rk_BSGR: Float[Array, "B S G R_cached"] | Int8Rows
    rv_BSGR: Float[Array, "B S G Rv_cached"] | Int8Rows
    up_value_GRK: Float[Array, "G Rv K"]
    q_latent_BTHR: Float[Array, "B T H R"] | None = None
    up_key_GRK: Float[Array, "G R K"] | None = None
    angles_SK: Float[Array, "S K"] | None = None
    q_BTHK: Float[Array, "B T H K"] | None = None


RESIDUAL_AXES = Residual._make(["BSGR", "BSGR", "GRK", "BTHR", "GRK", "SK", "BTHK"])


def lrkv_decode(
    q_BTHK: Float[Array, "B T H K"],
    k_shared_BSK: Float[Array, "B S K"] | Int8Rows,
    v_shared_BSK: Float[Array, "B S K"] | Int8Rows,
    residual: Residual | None,
    inverse_norm_BGS: Float[Array, "B G S"] | None,
    lengths_B: Int[Array, "B"],
    *,
    scale: float,
    pages_BN: Int[Array, "B N"] | None = None,
    window: int | None = None,
    frequencies_J: tuple[float, ...] | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Attend each sequence's last T tokens to the factored cache, which already holds them.

    `q_BTHK` is rotated, by `frequencies_J` angles per position (None: RoPE's). `residual` is
    None at rank 0; its heads, and those of `inverse_norm_BGS`, may be groups of query heads, as
    many as divide them, and `inverse_norm_BGS` (float32, H = 1 at rank 0) is None without QK-norm.
    Lengths, pages, `window`, `impl`, results and what is raised as in `grouped_decode`; the pool of
    inverse norms is [P, H, 64]. LRKV is arXiv 2601.11471's; the factored decode of rotated keys is
    ours.
    """
    if residual is not None:
        R_k, R_v = residual.rk_BSGR.shape[-1], residual.rv_BSGR.shape[-1]
        residual = residual._replace(
            up_value_GRK=online.padded(residual.up_value_GRK, 1, R_v),
            q_latent_BTHR=online.padded(residual.q_latent_BTHR, 3, R_k),
            up_key_GRK=online.padded(residual.up_key_GRK, 1, R_k),
        )
    arrays = (q_BTHK, k_shared_BSK, v_shared_BSK, residual, inverse_norm_BGS, pages_BN)
    axes = ("BTHK", "BSK", "BSK", residual and RESIDUAL_AXES, "BGS", "BN")
    return dispatch.run(
        "lrkv_decode", _xla, _mosaic, _plan(*arrays, impl), arrays, axes, lengths_B,
        scale=scale, impl=impl, window=window, frequencies_J=frequencies_J,
    )  # fmt: skip


def _by_group(q_BTHK, residual):
    """(heads of a group, queries, residual): a group's heads as further queries of one head."""
    if residual is None:
        return 1, q_BTHK, None
    G = residual.rk_BSGR.shape[2]
    for name in ("q_latent_BTHR", "q_BTHK"):
        if (query_BTHW := getattr(residual, name)) is not None:
            residual = residual._replace(**{name: online.as_queries(query_BTHW, G)})
    return q_BTHK.shape[2] // G, online.as_queries(q_BTHK, G), residual


def raise_values(shared_BTHK, mean_BTHR, up_value_GRK):
    """a · V_shared + (a · rv) Bᵀ: values carry no rotation, so the paper's equation is exact."""
    up_value_GRK = up_value_GRK.astype(jnp.float32)
    return shared_BTHK + jnp.einsum("BTHR,HRK->BTHK", mean_BTHR, up_value_GRK)


def _xla(
    q_BTHK,
    k_shared_BSK,
    v_shared_BSK,
    residual,
    inverse_norm_BGS,
    pages_BN,
    lengths_B,
    scale,
    frequencies_J=None,
    window=None,
):
    repeats, q_BTHK, residual = _by_group(q_BTHK, residual)
    T, H, K = q_BTHK.shape[1:]
    products, rotated = [("BHTK,BcK->BHTc", q_BTHK.swapaxes(1, 2), k_shared_BSK)], []
    widest, rv_BSGR = K, None
    if residual is not None:
        rk_BSGR, rv_BSGR = residual.rk_BSGR, residual.rv_BSGR
        widest = max(K, H * rk_BSGR.shape[-1])
        if residual.q_latent_BTHR is None:
            own_BTHK = q_BTHK if residual.q_BTHK is None else residual.q_BTHK
            logits_SBTH = angles.logits(
                own_BTHK, residual.up_key_GRK, residual.angles_SK, rk_BSGR, lengths_B,
                frequencies_J, pages_BN,
            )  # fmt: skip
            rotated.append(logits_SBTH)
        else:
            q_BTHR = residual.q_latent_BTHR.astype(rk_BSGR.dtype)
            products.append(("BTHR,BcHR->BHTc", q_BTHR, rk_BSGR))
    sums, lse_BTH = online.attend_factored(
        products, rotated, v_shared_BSK, rv_BSGR, inverse_norm_BGS, lengths_B, pages_BN,
        scale=scale, T=T, H=H, widest=widest, repeats=repeats, window=window,
    )  # fmt: skip
    out_BTHK = sums[0] if residual is None else raise_values(*sums, residual.up_value_GRK)
    return online.as_heads(out_BTHK, repeats), online.as_heads(lse_BTH, repeats)


def _plan(q_BTHK, k_shared_BSK, v_shared_BSK, residual, inverse_norm_BGS, pages_BN, impl):
    """(plan, None), or (None, reason why the Mosaic kernel cannot run)."""
    repeats, q_BTHK, residual = _by_group(q_BTHK, residual)
    _, T, H, K = q_BTHK.shape
    widths, own = {"head width": K}, {}
    if residual is not None:
        R, R_v = residual.rk_BSGR.shape[-1], residual.rv_BSGR.shape[-1]
        if R != R_v:
            return None, f"cached ranks = {R} for keys, {R_v} for values: the kernel has one rank"
        widths["cached rank"] = R
        own = {"rank": R, "full": residual.q_latent_BTHR is None, "repeats": repeats}
        if own["full"] and K > 2 * plans.WIDTH:
            return None, f"head width = {K}: the kernel rotates keys of up to 128"
    if inverse_norm_BGS is not None:
        own |= {"norm_heads": 1, "shared_norm": inverse_norm_BGS.shape[1] == 1}
    return plans.find(
        k_shared_BSK.dtype, widths, impl,
        T=T, slots=k_shared_BSK.shape[1], paged=pages_BN is not None, H=H, G=1,
        key_widths=(K,), value_width=K, **own,
    )  # fmt: skip


def _mosaic(
    plan, q_BTHK, k_shared_BSK, v_shared_BSK, residual, inverse_norm_BGS, pages_BN, lengths_B,
    scale, interpret,
):  # fmt: skip
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.gpu.launch import attend

    repeats, q_BTHK, residual = _by_group(q_BTHK, residual)
    T, K = q_BTHK.shape[1], q_BTHK.shape[3]
    dtype = k_shared_BSK.dtype
    queries = columns.to_columns(plan, q_BTHK.astype(dtype))
    operands = {"keys": k_shared_BSK[:, :, None], "values": v_shared_BSK[:, :, None]}
    operands["pages"] = pages_BN
    if residual is not None:
        operands |= {"rk": residual.rk_BSGR, "rv": residual.rv_BSGR}
    if plan.full:
        operands |= _full_operands(plan, q_BTHK, residual, dtype)
    elif residual is not None:
        latent = columns.to_columns(plan, residual.q_latent_BTHR.astype(dtype))
        own = columns.own_columns(plan, latent)
        queries = jnp.concatenate([queries, own], axis=3)
    if plan.norm_heads:
        operands["norms"] = inverse_norm_BGS
    operands["queries"] = queries
    sums, lse = attend(plan, operands, lengths_B, T=T, scale=scale, interpret=interpret)
    out_BTHK = columns.values_of(plan, sums, T, 0, K)
    if residual is not None:
        mean_BTHR = columns.values_of(plan, sums, T, plan.value_blocks, plan.rank)
        out_BTHK = raise_values(out_BTHK, mean_BTHR, residual.up_value_GRK)
    lse_BTH = columns.from_columns(plan, lse, T)
    return online.as_heads(out_BTHK, repeats), online.as_heads(lse_BTH, repeats)


def _full_operands(plan, q_BTHK, residual, dtype):
    """Operands of rebuilding: B_h in halves of 64 columns, float32 queries and angles likewise."""
    up_HRK, angles_SK = residual.up_key_GRK, residual.angles_SK
    H, R, K = up_HRK.shape
    width, J = plans.WIDTH, K // 2
    rows = plan.rank_blocks * width - R

    def halves(array):
        """[..., K] → [..., 2, 64]: the two coordinates of each frequency pair, zero-padded."""
        pairs = array.reshape(*array.shape[:-1], 2, J)
        return jnp.pad(pairs, [(0, 0)] * (pairs.ndim - 1) + [(0, width - J)])

    up = jnp.pad(halves(up_HRK).reshape(H, R, 2 * width), ((0, 0), (0, rows), (0, 0)))
    q = columns.to_columns(plan, halves(q_BTHK.astype(jnp.float32)).reshape(*q_BTHK.shape[:3], -1))
    B, U, Q = q.shape[:3]
    used = plan.heads * plan.queries
    return {
        "up": up.reshape(H * plan.rank_blocks, width, 2 * width).astype(dtype),
        "full_queries": q.swapaxes(3, 4)[:, :, :, :used].reshape(B, U, Q, used, 2, width),
        "angles": halves(angles_SK),
    }
