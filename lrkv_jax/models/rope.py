"""Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), in Llama's half-split order.

Coordinate j of the first half pairs with coordinate j of the second:
(x1, x2) → (x1·cos − x2·sin, x2·cos + x1·sin).

Pair j of J = W // 2 turns by base^(−2j/W) per position. For longer sequences than it was trained
on, a model may divide that by a `factor` where it is low, and keep it where it is high:

    kept + (1 − kept) / factor    of each frequency, where `kept` is
    linear    0
    llama3    (t − low_freq_factor) / (high_freq_factor − low_freq_factor), t the pair's turns
              within `original_context`
    yarn      1 − (j − j_fast) / (j_slow − j_fast), j_fast and j_slow the pairs (no whole numbers)
              of `beta_fast` and `beta_slow` turns (Peng et al. 2023,
              https://arxiv.org/abs/2309.00071)

each within [0, 1]. This is what transformers' `modeling_rope_utils` computes. YaRN also multiplies
logits (`logit_factor`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.kernels.angles import frequencies as unscaled


def frequencies(width: int, base: float, scaling: RopeScaling | None = None) -> tuple[float, ...]:
    """The angle per position of each of the J = width // 2 pairs, in float64."""
    plain = unscaled(width, base)
    if scaling is None:
        return plain
    kept_J = np.clip(_kept(width, base, scaling), 0, 1)
    return tuple(plain * (kept_J + (1 - kept_J) / scaling.factor))


def rope_angles(
    positions: Int[Array, "..."], width: int, base: float, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "... J"], Float[Array, "... J"]]:
    """cos and sin of position · frequency for the J = width // 2 pairs, in float32.

    Within 2e-7 of float64's at every int32 position, so that all programs agree: an angle is
    counted in int32, in units of 2⁻³² turns, and only its distance from the nearest quarter turn,
    π / 4 at most, becomes a float.
    """
    # As float32 products, angles of position 131,072 would be off by 4e-3, and of 8,192 by 2e-4.
    turn = 2**32
    turns_J = np.array(frequencies(width, base, scaling)) / (2 * math.pi) * turn
    whole_J = np.floor(turns_J)
    part_J = (turns_J - whole_J).astype(np.float32)
    whole_J = (whole_J % turn).astype(np.uint32).view(np.int32)
    positions = jnp.asarray(positions, jnp.int32)[..., None]
    # Products of int32 wrap, as angles do.
    carried = positions.astype(jnp.float32) * part_J
    units = jnp.round(carried)
    phase = positions * whole_J + units.astype(jnp.int32)
    quarter = (phase + turn // 8) >> 30
    rest = (phase - (quarter << 30)).astype(jnp.float32) + (carried - units)
    angle = rest * np.float32(2 * math.pi / turn)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    odd = (quarter & 1) == 1
    cos, sin = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    cos = jnp.where(((quarter + 1) & 2) == 2, -cos, cos)
    sin = jnp.where((quarter & 2) == 2, -sin, sin)
    # Made once: fused into the rotation, XLA would make them again for each head and each half,
    # forward and backward. A block of the quickstart takes 0.89 of the time without that.
    return jax.lax.optimization_barrier((cos, sin))


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


def logit_factor(scaling: RopeScaling | None) -> float:
    """The factor of logits: the square of YaRN's attention factor, or 1."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor**2

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(scaling.factor) + 1

    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return grown(1.0) ** 2
    return (grown(scaling.mscale) / grown(scaling.mscale_all_dim)) ** 2


def _kept(width, base, scaling):
    """The share of each frequency that stays, not yet within [0, 1]."""
    pairs_J = np.arange(width // 2)
    if scaling.kind == "linear":
        return np.zeros(len(pairs_J))
    reach = scaling.original_context / (2 * math.pi)
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
        return (reach * np.array(unscaled(width, base)) - low) / (high - low)
    # base^(−2j/W) · reach = turns, solved for j, which need be no pair.
    fast, slow = (
        width * math.log(reach / turns) / (2 * math.log(base))
        for turns in (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0)
    )
    if scaling.truncate is not False:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, width - 1)
    return 1 - (pairs_J - fast) / (slow - fast or 0.001)
