"""Each variant's attention in float64 numpy, head by head and pair by pair, from its equations.

Written for the eye, not from the code under test: weights come in by name, x [T, D] is one
sequence, and the result is each head's output [T, H, K] before the output projection.
"""

import numpy as np

from lrkv_jax.config import LRKV, MLA

EPS = 1e-6


def rope(x_TW, positions_T, base=10_000.0):
    """Halves paired as complex numbers, pair j turned by p · base^(−2j/W)."""
    x_TW = np.asarray(x_TW, np.float64)
    W = x_TW.shape[1]
    J = W // 2
    out = x_TW.copy()
    for j in range(J):
        turn_T = np.exp(1j * np.asarray(positions_T, np.float64) * base ** (-2 * j / W))
        z_T = (x_TW[:, j] + 1j * x_TW[:, J + j]) * turn_T
        out[:, j], out[:, J + j] = z_T.real, z_T.imag
    return out


def normed(x_TW, eps=EPS):
    x_TW = np.asarray(x_TW, np.float64)
    return x_TW / np.sqrt((x_TW**2).mean(axis=-1, keepdims=True) + eps)


def softmax_causal(logits_TS, segments_T=None):
    """Row t over the columns s ≤ t, and of t's own segment."""
    T = len(logits_TS)
    weights = np.zeros((T, T))
    for t in range(T):
        seen = [s for s in range(t + 1) if segments_T is None or segments_T[s] == segments_T[t]]
        w = np.exp(logits_TS[t, seen] - logits_TS[t, seen].max())
        weights[t, seen] = w / w.sum()
    return weights


def attention(config, weights, x_TD, positions_T, segments_T=None):
    """Heads' outputs [T, H, K] of one sequence."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x_TD = np.asarray(x_TD, np.float64)
    norm = normed if config.qk_norm else lambda x: x
    outputs = []
    for h in range(config.heads):
        logits_TS, v_SK = head(config, w, h, x_TD, np.asarray(positions_T), norm)
        outputs.append(softmax_causal(logits_TS, segments_T) @ v_SK)
    return np.stack(outputs, axis=1)


def head(config, w, h, x_TD, positions_T, norm):
    """Scaled logits [T, S] and values [S, K] of head h."""
    K = config.head_width
    q_TK = x_TD @ w["query"][:, h]
    if isinstance(config.attention, MLA):
        return mla_head(config, w, h, x_TD, positions_T, norm)
    q_TK = norm(q_TK)
    if isinstance(config.attention, LRKV):
        return lrkv_head(config, w, h, x_TD, positions_T, q_TK)
    g = h // (config.heads // w["key"].shape[1])
    k_SK = norm(rope(x_TD @ w["key"][:, g], positions_T))
    return rope(q_TK, positions_T) @ k_SK.T / np.sqrt(K), x_TD @ w["value"][:, g]


def mla_head(config, w, h, x_TD, positions_T, norm):
    K, P, C = config.head_width, config.attention.rope_width, config.attention.latent
    # The latents' norm is there without QK-norm too.
    latent = normed if config.attention.latent_norm else lambda y: y
    q_TK, latent_SC = x_TD @ w["query"][:, h], latent(x_TD @ w["down"])
    h = h // (config.heads // w["up_key"].shape[1])  # heads of a group have one key and value
    k_SK, v_SK = latent_SC @ w["up_key"][:, h], latent_SC @ w["up_value"][:, h]
    own_SR, R = None, config.attention.rank
    if R:
        own_SR = latent(x_TD @ w["private_down"][h])
        k_SK, v_SK = k_SK + own_SR @ w["private_key"][h], v_SK + own_SR @ w["private_value"][h]
    if config.attention.rope == "full":
        q_TK, k_SK = norm(rope(q_TK, positions_T)), norm(rope(k_SK, positions_T))
        return q_TK @ k_SK.T / np.sqrt(K), v_SK
    if config.attention.rope == "latent":
        q_TX = rope(q_TK @ w["up_key"][:, h].T, positions_T)
        k_SX = rope(latent_SC, positions_T)
        if R:
            q_TX = np.concatenate([q_TX, rope(q_TK @ w["private_key"][h].T, positions_T)], axis=1)
            k_SX = np.concatenate([k_SX, rope(own_SR, positions_T)], axis=1)
        return norm(q_TX) @ k_SX.T / np.sqrt(C + R), v_SK
    logits_TS = norm(q_TK) @ k_SK.T
    if P:
        q_TP = norm(rope(x_TD @ w["query_rope"][:, h], positions_T))
        logits_TS += q_TP @ norm(rope(x_TD @ w["rope_key"], positions_T)).T
    return logits_TS / np.sqrt(K + P), v_SK


def lrkv_head(config, w, h, x_TD, positions_T, q_TK):
    K, mode = config.head_width, config.attention.rope
    read = "key" if config.attention.tied else "value"  # by values
    shared_SK, residual_SK, v_SK = x_TD @ w["key"], 0.0, x_TD @ w[read]
    if config.attention.rank:
        h = h // (config.heads // len(w["key_up"]))  # heads of a group have one residual
        residual_SK = x_TD @ (w["key_down"][h] @ w["key_up"][h])
        v_SK = x_TD @ (w[read] + w[f"{read}_down"][h] @ w["value_up"][h])
    k_SK = shared_SK + residual_SK
    rotated_TK = rope(q_TK, positions_T)
    if mode == "full" or not config.attention.rank:
        logits_TS = rotated_TK @ rope(k_SK, positions_T).T
    else:
        q_TR, r_SR = q_TK @ w["key_up"][h].T, x_TD @ w["key_down"][h]
        if mode == "latent":
            q_TR, r_SR = rope(q_TR, positions_T), rope(r_SR, positions_T)
        logits_TS = rotated_TK @ rope(shared_SK, positions_T).T + q_TR @ r_SR.T
    if config.qk_norm:  # by the whole unrotated key
        logits_TS = logits_TS / np.sqrt((k_SK**2).mean(axis=-1) + EPS)
    return logits_TS / np.sqrt(K), v_SK
