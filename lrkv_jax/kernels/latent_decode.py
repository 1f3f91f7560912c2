"""Cached attention to latents that are read once, as key and as value.

All heads read one latent c per token, and heads or groups of them may have private latents r next
to it. The cache holds both unrotated. Logits of a position s are n_h(s) times the sum of

    c, alone      q·c                                    MLA `decoupled`, which adds q'·k', its rope
                                                         key
       in keys    [cos sΘ, sin sΘ] · M_h(q) · c          MLA `full`
    r, alone      q''·r                                  MLA `decoupled`
       in keys    [cos sΘ, sin sΘ] · M_h(q) · r          MLA `full`

where q and q'' are queries in the latents' spaces. The values are the latents. M_h(q) carries the
rotated query and RoPE across the factor that makes keys (`lrkv_jax.kernels.lrkv_decode`), and n_h
is 1/rms of head h's key, or 1.

B batch  T queries  S cache slots  c slots of a chunk  H heads  G groups of them  K head width
C latent width  R width of a group's latents  P rope-key width
X width of a query: C, in mode `full` K  Y of an output: C, with private latents C + R'
J = K / 2 frequency pairs
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lrkv_jax.kernels import angles, dispatch, online
from lrkv_jax.kernels.gpu import columns
from lrkv_jax.kernels.gpu import plan as plans
from lrkv_jax.kernels.int8 import Int8Rows


class Rotation(NamedTuple):
    """The rotation of keys as they are read: [cos, sin] of each slot's position, and the factors.

    `up_key_CGK` makes the keys of heads, or of groups of them. `inverse_norm_BGS` is float32, or
    None.
    """

    angles_SK: Float[Array, "S K"]
    up_key_CGK: Float[Array, "C G K"]
    inverse_norm_BGS: Float[Array, "B G S"] | None = None


class Private(NamedTuple):
    """Latents [B, S, G, R'] of groups of heads, perhaps padded: R ≤ R'.

    Their queries are `q_BTHR`, or they are rotated in the keys that `up_key_GRK` makes, by
    `Rotation.angles_SK`.
    """

    latent_BSGR: Float[Array, "B S G R_cached"] | Int8Rows
    q_BTHR: Float[Array, "B T H R"] | None = None
    up_key_GRK: Float[Array, "G R K"] | None = None


ROTATION_AXES = Rotation._make(["SK", "CGK", "BGS"])
PRIVATE_AXES = Private._make(["BSGR", "BTHR", "GRK"])


def latent_decode(
    q_BTHX: Float[Array, "B T H X"],
    q_rope_BTHP: Float[Array, "B T H P"] | None,
    latent_BSC: Float[Array, "B S C"] | Int8Rows,
    rope_key_BSP: Float[Array, "B S P"] | Int8Rows | None,
    rotation: Rotation | None,
    private: Private | None,
    lengths_B: Int[Array, "B"],
    *,
    scale: float,
    frequencies_J: tuple[float, ...] | None = None,
    pages_BN: Int[Array, "B N"] | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T H Y"], Float[Array, "B T H"]]:
    """Attend each sequence's last T tokens to the cache, which already holds them.

    `rotation` is None in mode `decoupled`, and the rope query and key in `full`; `private` is None
    without latents of single heads. `q_BTHX` is in the latent's space; in `full` it is each head's
    rotated query, K wide, and `frequencies_J` are the
    angles per position that rotated it (None: RoPE's). With groups, inverse norms are the
    groups'. Lengths, pages, `impl`, results and what is raised as in `grouped_decode`, the output
    still in the latents. MLA is DeepSeek-V2's (arXiv 2405.04434, section 2.1).
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
    return dispatch.run(
        "latent_decode", _xla, _mosaic, _plan(*arrays, impl), arrays, axes, lengths_B,
        scale=scale, impl=impl, window=window, frequencies_J=frequencies_J,
    )  # fmt: skip


def _plan(q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, pages_BN, impl):
    """(plan, None) or (None, reason), for one key head of width C + P."""
    (_, T, H, _), C = q_BTHX.shape, latent_BSC.shape[-1]
    if private is not None:
        return None, "it reads one latent of all heads, and no private ones"
    if rotation is not None:
        return None, "it rebuilds no keys from a latent of all heads"
    P = q_rope_BTHP.shape[-1]
    return plans.find(
        latent_BSC.dtype, {"latent width": C, "rope-key width": P}, impl,
        T=T, slots=latent_BSC.shape[1], paged=pages_BN is not None, H=H, G=1,
        key_widths=(C, P) if P else (C,), value_width=C, values_in_keys=True,
    )  # fmt: skip


def _mosaic(
    plan, q_BTHX, q_rope_BTHP, latent_BSC, rope_key_BSP, rotation, private, pages_BN, lengths_B,
    scale, interpret,
):  # fmt: skip
    # Imported here: a CPU needs no Pallas, and it takes a while to load.
    from lrkv_jax.kernels.gpu.launch import attend

    T, C, dtype = q_BTHX.shape[1], latent_BSC.shape[-1], latent_BSC.dtype
    queries = [columns.to_columns(plan, q_BTHX.astype(dtype))]
    operands = {"keys": latent_BSC[:, :, None], "pages": pages_BN}
    if rope_key_BSP.shape[-1]:
        queries.append(columns.to_columns(plan, q_rope_BTHP.astype(dtype)))
        operands["more_keys"] = rope_key_BSP[:, :, None]
    operands["queries"] = jnp.concatenate(queries, axis=3)
    sums, lse = attend(plan, operands, lengths_B, T=T, scale=scale, interpret=interpret)
    return columns.values_of(plan, sums, T, 0, C), columns.from_columns(plan, lse, T)


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
    window=None,
):
    G = q_BTHX.shape[2]
    if private is not None:
        G = private.latent_BSGR.shape[2]
    elif rotation is not None:
        G = rotation.up_key_CGK.shape[1]
    # A group's heads are further queries of one head.
    repeats, q_BTHX = q_BTHX.shape[2] // G, online.as_queries(q_BTHX, G)
    T, H = q_BTHX.shape[1:3]
    products, rotated = [], []
    widest, own_BSHR = latent_BSC.shape[-1], None

    def add_rotated(up_HRK, latent_BSHR):
        """Logits of latents that are rotated in the keys that they make."""
        logits_SBTH = angles.logits(
            q_BTHX, up_HRK, rotation.angles_SK, latent_BSHR, lengths_B, frequencies_J, pages_BN
        )
        rotated.append(logits_SBTH)

    if rotation is not None:
        # One head's latents instead of H: they are multiplied by every head's M_h(q).
        of_one_BS1C = jax.tree.map(lambda array: array[:, :, None], latent_BSC)
        add_rotated(rotation.up_key_CGK.swapaxes(0, 1), of_one_BS1C)
    else:
        q_BHTP = online.as_queries(q_rope_BTHP, G).swapaxes(1, 2)
        products.append(("BHTC,BcC->BHTc", q_BTHX.swapaxes(1, 2), latent_BSC))
        products.append(("BHTP,BcP->BHTc", q_BHTP, rope_key_BSP))
    if private is not None:
        own_BSHR = private.latent_BSGR
        widest = max(widest, H * own_BSHR.shape[-1])
        if private.up_key_GRK is not None:
            add_rotated(private.up_key_GRK, own_BSHR)
        else:
            q_BTHR = online.as_queries(private.q_BTHR, G).astype(own_BSHR.dtype)
            products.append(("BTHR,BcHR->BHTc", q_BTHR, own_BSHR))
    sums, lse_BTH = online.attend_factored(
        products, rotated, latent_BSC, own_BSHR, rotation and rotation.inverse_norm_BGS, lengths_B,
        pages_BN, scale=scale, T=T, H=H, widest=widest, repeats=repeats, window=window,
    )  # fmt: skip
    out_BTHX = jnp.concatenate(sums, axis=-1)
    return online.as_heads(out_BTHX, repeats), online.as_heads(lse_BTH, repeats)
