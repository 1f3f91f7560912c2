"""Cached attention for absorbed MLA: every head reads one latent and one rope key a token."""

import jax.numpy as jnp

from lrkv_jax.kernels.cached_softmax import cached_softmax


def latent_decode(q_latent_BTHC, q_rope_BTHP, latent_BSC, rope_key_BSP, positions_BT, *, scale):
    """Attend T new queries, moved into the latent's coordinates, to the cached latents.

    logits = q_latent · latent + q_rope · rope_key; the values are the latents themselves.
    Returns [B, T, H, C] in the latent's dtype; products accumulate in float32.
    """
    f32 = {"preferred_element_type": jnp.float32}
    logits_BHTS = jnp.einsum("BTHC,BSC->BHTS", q_latent_BTHC, latent_BSC, **f32)
    logits_BHTS += jnp.einsum("BTHP,BSP->BHTS", q_rope_BTHP, rope_key_BSP, **f32)
    weights_BHTS = cached_softmax(scale * logits_BHTS, positions_BT).astype(latent_BSC.dtype)
    return jnp.einsum("BHTS,BSC->BTHC", weights_BHTS, latent_BSC)
