"""Attention of many queries over a cache whose keys and values exist for a tile of slots at a time.

B batch  T queries  S cache slots  c slots of a tile  H heads  G key/value heads  N = H / G
W logit width  K head width
"""

import jax.numpy as jnp

from lrkv_jax.kernels import online
from lrkv_jax.models.attention.cache import slot_axes, slots_of

# Slots of a tile: memory is linear in T times this, whatever the cache's length.
TILE = 512


def attend_tiles(q_BTHW, cache, materialise, lengths_B, *, scale, pages_BN=None):
    """Attend each sequence's last T tokens, at all its cached ones up to each, to `cache`.

    `materialise(some slots of the cache, their positions [1, c])` gives keys [B, c, G, W] and
    values [B, c, G, K]. `lengths_B` counts the T tokens too. With `pages_BN` the cache is a pool.
    Returns float32 [B, T, H, K].
    """
    S = slots_of(cache, pages_BN)
    chunk = min(S, TILE)
    B, T, H, W = q_BTHW.shape
    f32 = {"preferred_element_type": jnp.float32}

    def keys_values(start):
        tile = {
            name: online.slots(getattr(cache, name), pages_BN, start, chunk, axis=axis)
            for name, axis in slot_axes(cache).items()
        }
        return materialise(type(cache)(**tile), (start + jnp.arange(chunk))[None])

    # As in `flash`: heads before positions, a group's queries in one axis, plain batched products.
    def logits(index, start):
        k_BcGW = keys_values(start)[0]
        G = k_BcGW.shape[2]
        q_BGXW = q_BTHW.swapaxes(1, 2).reshape(B, G, H // G * T, W)
        logits_BGXc = jnp.matmul(q_BGXW, k_BcGW.transpose(0, 2, 3, 1), **f32)
        return scale * logits_BGXc.reshape(B, H, T, chunk)

    def values(weights_BHTc, start, seen_Bc):
        v_BcGK = keys_values(start)[1]
        v_BcGK = jnp.where(seen_Bc[:, :, None, None], v_BcGK, 0)
        G = v_BcGK.shape[2]
        weights_BGXc = weights_BHTc.reshape(B, G, H // G * T, chunk).astype(v_BcGK.dtype)
        sums_BGXK = jnp.matmul(weights_BGXc, v_BcGK.swapaxes(1, 2), **f32)
        return (sums_BGXK.reshape(B, H, T, -1),)

    (out_BHTK,), _ = online.attend(logits, values, lengths_B, T=T, S=S, chunk=chunk)
    return out_BHTK.swapaxes(1, 2)
