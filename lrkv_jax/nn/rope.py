"""Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), in Llama's half-split order.

Coordinate j of the first half pairs with coordinate j of the second:
(x1, x2) → (x1·cos − x2·sin, x2·cos + x1·sin).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_angles(
    positions: Int[Array, "..."], width: int, base: float
) -> tuple[Float[Array, "... J"], Float[Array, "... J"]]:
    """cos and sin of position · base^(−2j/width) for the J = width // 2 pairs, in float32."""
    frequencies_J = base ** (-2.0 * jnp.arange(width // 2, dtype=jnp.float32) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies_J
    # Made once: fused into the rotation, XLA would make them again for each head and each half,
    # forward and backward. A block of the quickstart takes 0.89 of the time without that.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(
    x: Float[Array, "... W"], cos: Float[Array, "... J"], sin: Float[Array, "... J"]
) -> Float[Array, "... W"]:
    """Rotate the J = W // 2 pairs of x; an odd last coordinate is left alone.

    cos and sin broadcast against x over its leading axes; computed in float32, returned in x's
    dtype.
    """
    pairs = cos.shape[-1]
    x1, x2, rest = jnp.split(x.astype(jnp.float32), [pairs, 2 * pairs], axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)
    return rotated.astype(x.dtype)
