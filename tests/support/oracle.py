"""Each variant's attention in float64 numpy, head by head and pair by pair, from its equations.

Written for the eye, not from the code under test: weights come in by name, x [T, D] is one
sequence, and the result is each head's output [T, H, K] before the output projection.
"""

from functools import partial

import jax
import numpy as np

from lrkv_jax.models.attention import LRKV, MLA
from lrkv_jax.models.rope import frequencies, logit_factor


def rope(x_TW, positions_T, base=10_000.0, scaling=None):
    """Halves paired as complex numbers, pair j turned by p · base^(−2j/W).

    Scaled frequencies are the package's own: tests/models/test_rope.py holds them against others.
    """
    x_TW = np.asarray(x_TW, np.float64)
    W = x_TW.shape[1]
    J = W // 2
    turns_J = [base ** (-2 * j / W) for j in range(J)]
    if scaling is not None:
        turns_J = frequencies(W, base, scaling)
    out = x_TW.copy()
    for j in range(J):
        turn_T = np.exp(1j * np.asarray(positions_T, np.float64) * turns_J[j])
        z_T = (x_TW[:, j] + 1j * x_TW[:, J + j]) * turn_T
        out[:, j], out[:, J + j] = z_T.real, z_T.imag
    return out


def normed(x_TW, eps):
    x_TW = np.asarray(x_TW, np.float64)
    return x_TW / np.sqrt((x_TW**2).mean(axis=-1, keepdims=True) + eps)


def softmax_causal(logits_TS, segments_T=None, window=None):
    """Row t over the columns s ≤ t, the last `window` of them, and of t's own segment."""
    T = len(logits_TS)
    weights = np.zeros((T, T))
    for t in range(T):
        first = 0 if window is None else max(0, t + 1 - window)
        seen = range(first, t + 1)
        seen = [s for s in seen if segments_T is None or segments_T[s] == segments_T[t]]
        w = np.exp(logits_TS[t, seen] - logits_TS[t, seen].max())
        weights[t, seen] = w / w.sum()
    return weights


def attention(config, weights, x_TD, positions_T, segments_T=None):
    """Heads' outputs [T, H, K] of one sequence."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x_TD = np.asarray(x_TD, np.float64)
    norm = partial(normed, eps=config.norm_eps) if config.qk_norm else lambda x: x
    outputs = []
    for h in range(config.heads):
        logits_TS, v_SK = head(config, w, h, x_TD, np.asarray(positions_T), norm)
        outputs.append(softmax_causal(logits_TS, segments_T, config.window) @ v_SK)
    return np.stack(outputs, axis=1)


def head(config, w, h, x_TD, positions_T, norm):
    """Scaled logits [T, S] and values [S, K] of head h."""

    def turn(x_TW):
        if config.attention.mode == "none":
            return x_TW
        return rope(x_TW, positions_T, config.rope_base, config.rope_scaling)

    logits_TS, v_SK = unscaled_head(config, w, h, x_TD, turn, norm)
    if config.attention.mode == "none":
        return logits_TS, v_SK
    return logits_TS * logit_factor(config.rope_scaling), v_SK


def unscaled_head(config, w, h, x_TD, turn, norm):
    K = config.head_width
    q_TK = x_TD @ w["query"][:, h] + bias(w, "query", h)
    if isinstance(config.attention, MLA):
        return mla_head(config, w, h, x_TD, turn, norm)
    if isinstance(config.attention, LRKV) and config.attention.latent_norm == "joint":
        return deepseek_head(config, w, h, x_TD, turn, q_TK)
    if isinstance(config.attention, LRKV):
        return lrkv_head(config, w, h, x_TD, turn, norm(q_TK))
    g = h // (config.heads // w["key"].shape[1])
    k_SK = x_TD @ w["key"][:, g] + bias(w, "key", g)
    q_TK, k_SK = norm(q_TK) * gain(w, "query"), norm(k_SK) * gain(w, "key")
    return turn(q_TK) @ turn(k_SK).T / np.sqrt(K), x_TD @ w["value"][:, g]


def gain(w, name):
    """QK-norm's, after the norm and before the rotation."""
    return w.get(f"{name}_gain", 1.0)


def bias(w, name, h):
    """That of a query's or a key's head."""
    return w[f"{name}_bias"][h] if f"{name}_bias" in w else 0.0


def mla_head(config, w, h, x_TD, turn, norm):
    K, P = config.head_width, config.attention.qk_rope_head_dim

    # The latents' norm is there without QK-norm too.
    def latent(y):
        return normed(y, config.norm_eps) if config.attention.latent_norm else y

    q_TK, latent_SC = x_TD @ w["query"][:, h] + bias(w, "query", h), latent(x_TD @ w["down"])
    h = h // (config.heads // w["up_key"].shape[1])  # heads of a group have one key and value
    k_SK, v_SK = latent_SC @ w["up_key"][:, h] + bias(w, "key", h), latent_SC @ w["up_value"][:, h]
    if config.attention.rank:
        own_SR = latent(x_TD @ w["private_down"][h])
        k_SK, v_SK = k_SK + own_SR @ w["private_key"][h], v_SK + own_SR @ w["private_value"][h]
    if config.attention.rope == "full":
        q_TK, k_SK = norm(q_TK) * gain(w, "query"), norm(k_SK) * gain(w, "key")
        return turn(q_TK) @ turn(k_SK).T / np.sqrt(K), v_SK
    logits_TS = norm(q_TK) @ k_SK.T
    if P:
        q_TP = norm(turn(x_TD @ w["query_rope"][:, h]))
        logits_TS += q_TP @ norm(turn(x_TD @ w["rope_key"])).T
    return logits_TS / np.sqrt(K + P), v_SK


def lrkv_head(config, w, h, x_TD, turn, q_TK):
    K, mode = config.head_width, config.attention.rope
    shared_SK, residual_SK, v_SK = x_TD @ w["key"], 0.0, x_TD @ w["value"]
    if config.attention.rank:
        h = h // (config.heads // len(w["key_up"]))  # heads of a group have one residual
        residual_SK = x_TD @ (w["key_down"][h] @ w["key_up"][h])
        v_SK = x_TD @ (w["value"] + w["value_down"][h] @ w["value_up"][h])
    k_SK = shared_SK + residual_SK + bias(w, "key", h if config.attention.rank else 0)
    rotated_TK = turn(q_TK * gain(w, "query"))
    if mode in ("full", "none") or not config.attention.rank:
        logits_TS = rotated_TK @ turn(k_SK * gain(w, "key")).T
    else:
        q_TR, r_SR = q_TK @ w["key_up"][h].T, x_TD @ w["key_down"][h]
        if mode == "latent":
            q_TR, r_SR = turn(q_TR), turn(r_SR)
        logits_TS = rotated_TK @ turn(shared_SK).T + q_TR @ r_SR.T
    if config.qk_norm:  # by the whole unrotated key
        logits_TS = logits_TS / np.sqrt((k_SK**2).mean(axis=-1) + config.norm_eps)
    return logits_TS / np.sqrt(K), v_SK


def deepseek_head(config, w, h, x_TD, turn, q_TK):
    """The joint norm, by DeepSeek-V2's equations: absorbed factors of one latent c, C wide."""
    (G, _, R_k), (_, R_v, K) = w["key_down"].shape, w["value_up"].shape
    parts = [*w["key_down"], *w["value_down"], w["value"]]
    c_SC = normed(x_TD @ np.concatenate(parts, axis=1), config.norm_eps)
    g = h // (config.heads // G)
    up_key_CK, up_value_CK = np.zeros((2, c_SC.shape[1], K))
    up_key_CK[g * R_k : (g + 1) * R_k] = w["key_up"][g]
    up_value_CK[G * R_k + g * R_v : G * R_k + (g + 1) * R_v] = w["value_up"][g]
    up_value_CK[-K:] = np.eye(K)
    logits_TS = (q_TK @ up_key_CK.T) @ c_SC.T + turn(q_TK) @ turn(x_TD @ w["key"]).T
    return logits_TS / np.sqrt(K), c_SC @ up_value_CK


def logits(config, params, tokens_T):
    """[T, V] of one sequence, layer by layer, as Hugging Face's: a tied head is not scaled."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    positions_T = np.arange(len(tokens_T))

    def norm(x_TD, gains):
        y_TD = normed(x_TD, config.norm_eps)
        return y_TD * gains["gain"] if config.norm_gain else y_TD

    x_TD = p["embedding"]["table"][tokens_T]
    if config.embedding_norm:
        x_TD = normed(x_TD, config.norm_eps)
    for layer in range(config.layers):
        turn, place = divmod(layer, len(config.cycle))
        blocks = p["blocks"] if config.layers_pattern is None else p["blocks"][f"layer_{place}"]
        w = jax.tree.map(lambda leaf, at=turn: leaf[at], blocks)
        y_TD = norm(x_TD, w.get("norm_attention"))
        heads_THK = attention(config.cycle[place], w["attention"], y_TD, positions_T)
        x_TD = x_TD + np.tensordot(heads_THK, w["attention"]["output"], 2)
        x_TD = x_TD + w["attention"].get("output_bias", 0.0)
        y_TD = norm(x_TD, w.get("norm_mlp"))
        x_TD = x_TD + mlp(config, w["mlp"], y_TD)
    x_TD = norm(x_TD, p.get("norm"))
    logits_TV = x_TD @ (p["embedding"]["table"].T if config.tied_head else p["head"]["kernel"])
    cap = config.softcap
    return logits_TV if cap is None else cap * np.tanh(logits_TV / cap)


def mlp(config, w, x_TD):
    activation = {
        "silu": lambda x: x / (1 + np.exp(-x)), "relu2": lambda x: np.maximum(x, 0) ** 2
    }[config.activation]  # fmt: skip
    if config.gated:
        return (activation(x_TD @ w["gate"]) * (x_TD @ w["up"])) @ w["down"]
    return activation(x_TD @ w["up"]) @ w["down"]
