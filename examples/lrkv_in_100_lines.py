"""Low-rank key-value attention (LRKV, arXiv 2601.11471) in one file of JAX, to copy.

Weights, training, cache, and decoding from it, exact under RoPE and QK-norm. It checks itself.
B batch  T tokens  S cache slots  D model width  H heads  K head width  R rank  J = K / 2
"""

import jax
import jax.numpy as jnp

D, H, K, R = 64, 4, 16, 6


def init(key):
    """Shared keys and values (D × K), a residual of rank R for each head, queries and output."""
    names = "query_DHK key_DK key_down_HDR key_up_HRK value_DK value_down_HDR value_up_HRK"
    w, sizes = {}, {"D": D, "H": H, "K": K, "R": R}
    for name, k in zip([*names.split(), "output_HKD"], jax.random.split(key, 8), strict=True):
        shape = [sizes[axis] for axis in name.rpartition("_")[2]]
        std = 0.1 * R**-0.5 if "_up_" in name else D**-0.5  # U Bᵀ is a tenth of the shared matrix
        w[name] = std * jax.random.normal(k, shape)
    return w


def angles(positions):
    """cos and sin of each frequency pair at each position, [..., J]."""
    angle = positions[..., None] * 10_000.0 ** (-jnp.arange(0, K, 2) / K)
    return jnp.cos(angle), jnp.sin(angle)


def rope(x, positions):
    """x [..., K], rotated by its position."""
    (a, b), (cos, sin) = jnp.split(x, 2, axis=-1), angles(positions)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def inverse_rms(x):
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def queries(w, x_BTD, positions_BT):
    q_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, w["query_DHK"])
    return rope(q_BTHK * inverse_rms(q_BTHK), positions_BT[:, :, None])


def parts(w, x_BTD):
    """Shared key and value [B, T, K], and each head's latents [B, T, H, R]."""
    rk, rv = (jnp.einsum("BTD,HDR->BTHR", x_BTD, w[f"{n}_down_HDR"]) for n in ("key", "value"))
    return x_BTD @ w["key_DK"], x_BTD @ w["value_DK"], rk, rv


def forward(w, x_BTD):
    """Training: each head's keys and values are made, and attended to as in any attention."""
    positions_1T = jnp.arange(x_BTD.shape[1])[None]
    k_BTK, v_BTK, rk_BTHR, rv_BTHR = parts(w, x_BTD)
    k_BTHK = k_BTK[:, :, None] + jnp.einsum("BTHR,HRK->BTHK", rk_BTHR, w["key_up_HRK"])
    v_BTHK = v_BTK[:, :, None] + jnp.einsum("BTHR,HRK->BTHK", rv_BTHR, w["value_up_HRK"])
    k_BTHK = rope(k_BTHK * inverse_rms(k_BTHK), positions_1T[:, :, None])
    logits_BHTT = jnp.einsum("BTHK,BSHK->BHTS", queries(w, x_BTD, positions_1T), k_BTHK) * K**-0.5
    seen_TT = jnp.tri(x_BTD.shape[1], dtype=bool)
    weights_BHTT = jax.nn.softmax(jnp.where(seen_TT, logits_BHTT, -1e30))
    return jnp.einsum("BHTS,BSHK,HKD->BTD", weights_BHTT, v_BTHK, w["output_HKD"])


def init_cache(batch, length):
    """2 (K + H R) values and H norms a token, where multi-head attention has 2 H K values."""
    widths = {"k": (K,), "v": (K,), "rk": (H, R), "rv": (H, R), "norm": (H,)}
    return {name: jnp.zeros((batch, length, *width)) for name, width in widths.items()}


def decode(w, x_BD, cache, position):
    """One new token of each sequence, at `position`: its output, and the cache with it."""
    x_B1D, at_11 = x_BD[:, None], jnp.full((1, 1), position)
    k, v, rk, rv = parts(w, x_B1D)
    norm = inverse_rms(k[:, :, None] + jnp.einsum("BTHR,HRK->BTHK", rk, w["key_up_HRK"]))[..., 0]
    new = {"k": rope(k, at_11), "v": v, "rk": rk, "rv": rv, "norm": norm}  # latents unrotated
    cache = {n: jax.lax.dynamic_update_slice_in_dim(cache[n], new[n], position, 1) for n in cache}
    q_BHK = queries(w, x_B1D, at_11)[:, 0]
    # RoPE(B r) is linear in cos and sin of the key's position, so q carries B: that is M_h(q).
    a, b = (half[..., None, :] for half in jnp.split(q_BHK, 2, axis=-1))  # [B, H, 1, J]
    first, second = jnp.split(w["key_up_HRK"], 2, axis=-1)  # [H, R, J]
    m_BHRK = jnp.concatenate([a * first + b * second, b * first - a * second], axis=-1)
    slots_S = jnp.arange(cache["k"].shape[1])
    table_SK = jnp.concatenate(angles(slots_S), axis=-1)
    logits_BHS = jnp.einsum("BHK,BSK->BHS", q_BHK, cache["k"])
    logits_BHS += jnp.einsum("SK,BHRK,BSHR->BHS", table_SK, m_BHRK, cache["rk"])
    logits_BHS *= cache["norm"].swapaxes(1, 2) * K**-0.5
    weights_BHS = jax.nn.softmax(jnp.where(slots_S <= position, logits_BHS, -1e30))
    mean_BHR = jnp.einsum("BHS,BSHR->BHR", weights_BHS, cache["rv"])
    out_BHK = weights_BHS @ cache["v"] + jnp.einsum("BHR,HRK->BHK", mean_BHR, w["value_up_HRK"])
    return jnp.einsum("BHK,HKD->BD", out_BHK, w["output_HKD"]), cache


if __name__ == "__main__":
    w, x_BTD = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 20, D))
    cache, outputs = init_cache(2, 32), []
    for position in range(20):
        out_BD, cache = jax.jit(decode)(w, x_BTD[:, position], cache, position)
        outputs.append(out_BD)
    assert jnp.allclose(jnp.stack(outputs, axis=1), forward(w, x_BTD), atol=1e-5)
    print(f"decoded exactly, from {2 * (K + H * R)} values a token (MHA: {2 * H * K})")
