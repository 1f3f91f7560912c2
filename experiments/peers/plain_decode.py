"""Plain JAX that decodes a Llama folder, a peer of `peers.py`: what XLA does without an engine.

All texts are of one length, their keys are one array for each layer, and all new tokens are one
loop of one program: no pages, no requests, no sampling.

B texts  T tokens of each  S slots  D width  H heads  G key/value heads  N = H / G  K head width
"""

import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from answering import answer

from lrkv_jax.distributed import start
from lrkv_jax.interop.shards import read as read_tensors


def make(folder, requests, length, **_):
    config = json.loads((Path(folder) / "config.json").read_text())
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    F, eps = config["intermediate_size"], config["rms_norm_eps"]
    K = config.get("head_dim") or config["hidden_size"] // H
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    tensors = read_tensors(Path(folder))

    def stored(name):
        return tensors[f"{name}.weight"].make().astype(np.float32)

    def layer(number):
        def matrix(*names):
            parts = [stored(f"model.layers.{number}.{name}") for name in names]
            return jnp.asarray(np.concatenate(parts).T)

        heads = [f"self_attn.{part}_proj" for part in "qkv"]
        return (
            matrix("input_layernorm"), matrix(*heads), matrix("self_attn.o_proj"),
            matrix("post_attention_layernorm"), matrix("mlp.gate_proj", "mlp.up_proj"),
            matrix("mlp.down_proj"),
        )  # fmt: skip

    layers = [layer(number) for number in range(config["num_hidden_layers"])]
    embedding_VD = jnp.asarray(stored("model.embed_tokens"))
    head = "lm_head" if "lm_head.weight" in tensors else "model.embed_tokens"
    # Laid out as one text's product wants it, which takes 1.5 times as long otherwise.
    head_DV = jnp.asarray(np.ascontiguousarray(stored(head).T))
    model = embedding_VD, layers, jnp.asarray(stored("model.norm")), head_DV

    def norm(x, gain):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * gain

    def rotated(x_BGTK, places_T):
        angles_TJ = places_T[:, None] * base ** (-jnp.arange(0, K, 2) / K)
        cos, sin = jnp.cos(angles_TJ), jnp.sin(angles_TJ)
        a, b = jnp.split(x_BGTK, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def read(model, tokens_BT, caches, first):
        """(the next token of each text, caches) after tokens at `first` and what follows."""
        embedding_VD, layers, gain, head_DV = model
        B, T = tokens_BT.shape
        places_T = first + jnp.arange(T)
        seen_TS = jnp.arange(length) <= places_T[:, None]
        x_BTD, new = embedding_VD[tokens_BT], []
        for (gain_1, qkv, out, gain_2, up, down), (k_BGSK, v_BGSK) in zip(
            layers, caches, strict=True
        ):
            heads_BXTK = (norm(x_BTD, gain_1) @ qkv).reshape(B, T, -1, K).swapaxes(1, 2)
            q_BHTK, k_BGTK, v_BGTK = jnp.split(heads_BXTK, [H, H + G], axis=1)
            at = (0, 0, first, 0)
            k_BGSK = jax.lax.dynamic_update_slice(k_BGSK, rotated(k_BGTK, places_T), at)
            v_BGSK = jax.lax.dynamic_update_slice(v_BGSK, v_BGTK, at)
            q_BGNTK = rotated(q_BHTK, places_T).reshape(B, G, H // G, T, K) * K**-0.5
            logits = jnp.einsum("BGNTK,BGSK->BGNTS", q_BGNTK, k_BGSK)
            weights = jax.nn.softmax(jnp.where(seen_TS, logits, -1e30))
            y_BGNTK = jnp.einsum("BGNTS,BGSK->BGNTK", weights, v_BGSK)
            x_BTD += y_BGNTK.reshape(B, H, T, K).swapaxes(1, 2).reshape(B, T, -1) @ out
            gated, plain = jnp.split(norm(x_BTD, gain_2) @ up, [F], axis=-1)
            x_BTD += (jax.nn.silu(gated) * plain) @ down
            new.append((k_BGSK, v_BGSK))
        return (norm(x_BTD[:, -1], gain) @ head_DV).argmax(-1)[:, None], new

    @partial(jax.jit, static_argnames="count")
    def texts(model, prompts_BT, count):
        zeros = jnp.zeros((requests, G, length, K))
        first_B1, caches = read(model, prompts_BT, [(zeros, zeros)] * len(layers), 0)

        def step(carry, place):
            token_B1, caches = read(model, *carry, place)
            return (token_B1, caches), token_B1[:, 0]

        places = prompts_BT.shape[1] + jnp.arange(count - 1)
        _, more = jax.lax.scan(step, (first_B1, caches), places)
        return jnp.concatenate([first_B1, more.T], axis=1)

    def generate(prompts, new):
        began = time.perf_counter()
        tokens = np.asarray(texts(model, np.asarray(prompts, np.int32), new)).tolist()
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return f"jax {jax.__version__}", generate


if __name__ == "__main__":
    start()
    answer(make)
