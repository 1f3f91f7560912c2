"""LRKV's rotated residual, with the angles of a chunk compressed: the XLA path of mode `full`.

A residual logit of position i is [cos iΘ, sin iΘ] · M_h(q) · rk_h (`lrkv_jax.kernels.lrkv_decode`),
K · R products. But the angles of neighboring positions are nearly dependent: over c positions the
matrix [cos iΘ, sin iΘ] is P Q, to float32's rounding, with P of ρ columns, ρ far below K. So

    [cos iΘ, sin iΘ] · M_h(q) · rk_h = P_i (Q M_h(q)) · rk_h

costs ρ · R products per position, and ρ · K · R per chunk. Counted from the chunk's middle, which
is turned onto the query, cosines are even in i and sines odd. Each has a separate P and Q, of
ρ / 2 columns and K / 2 rows, and positions i and −i share both products: that halves either cost.

B batch  T queries  S cache slots  c slots of a chunk  n slots of half a chunk  b of a block of that
H heads  K head width  R residual rank  J = K / 2 frequency pairs  E, O columns of the two P
X all of B T H R
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.kernels.online import KEYS, chunk_starts, slots, slots_of

# Of each cosine and sine: half a unit in the last place of float32.
EXACT_TO = 2.0**-24
# Slots that share Q M: a shorter chunk pays for it more often, a longer one has a larger ρ.
CHUNK = 512
# XLA on a CPU gives an array of this many bytes, or more, to two threads.
SPLIT = 512 << 10


class Compressed(NamedTuple):
    """cos iΘ = even_nE @ even_EJ and sin iΘ = odd_nO @ odd_OJ for the upper half of a chunk.

    i counts from the chunk's middle: 0, 1, ... in an odd chunk, 1/2, 3/2, ... in an even one.
    `middle_K` is [cos, sin] of the middle's angle, counted from the first slot. All float32.
    """

    even_nE: np.ndarray
    even_EJ: np.ndarray
    odd_nO: np.ndarray
    odd_OJ: np.ndarray
    middle_K: np.ndarray


def frequencies(width: int, base: float = 10_000.0) -> tuple[float, ...]:
    """RoPE's angle per position, of each of the J = `width` // 2 pairs."""
    return tuple(base ** (-np.arange(0, width - 1, 2) / width))


@functools.cache
def compressed(frequencies_J: tuple[float, ...], chunk: int) -> Compressed:
    """The angles of `chunk` positions, of the smallest ranks that are exact to `EXACT_TO`."""
    middle = (chunk - 1) / 2
    angles_nJ = np.outer(np.arange(chunk // 2, chunk) - middle, frequencies_J)
    middle_J = middle * np.asarray(frequencies_J)
    middle_K = np.concatenate([np.cos(middle_J), np.sin(middle_J)])
    factors = (*_factors(np.cos(angles_nJ)), *_factors(np.sin(angles_nJ)), middle_K)
    return Compressed(*(array.astype(np.float32) for array in factors))


def _factors(values_nJ):
    """P, with columns of unit mean square, and Q, so that P Q is within `EXACT_TO`."""
    left_nr, singular_r, right_rJ = np.linalg.svd(values_nJ, full_matrices=False)
    size = len(values_nJ) ** 0.5
    left_nr, right_rJ = left_nr * size, singular_r[:, None] / size * right_rJ
    rank, left_over_nJ = 1, values_nJ - np.outer(left_nr[:, 0], right_rJ[0])
    while np.abs(left_over_nJ).max() > EXACT_TO:
        left_over_nJ -= np.outer(left_nr[:, rank], right_rJ[rank])
        rank += 1
    return left_nr[:, :rank], right_rJ[:rank]


def default_chunk(S, values):
    """Slots of a chunk. `values` are those of a row of P Q M.

    Twice as many slots on a CPU where P Q M is then, and only then, large enough for two threads.
    """
    at_once = 4 * values * CHUNK // 2
    doubled = jax.default_backend() == "cpu" and at_once < SPLIT <= 2 * at_once
    return min(S, 2 * CHUNK if doubled else CHUNK)


def logits(q_BTHK, up_HRK, angles_SK, rk_BSHR, lengths_B, frequencies_J=None, pages_BN=None):
    """The residual's part of each logit, float32 [S, B, T, H]; past the longest sequence, anything.

    `q_BTHK` is rotated, `angles_SK` are [cos, sin] of each slot's position, `frequencies_J` the
    angles per position; None: RoPE's. With `pages_BN`, `rk_BSHR` is a pool of pages.
    """
    (B, T, H, K), S = q_BTHK.shape, slots_of(rk_BSHR, pages_BN)
    chunk = default_chunk(S, B * T * H * up_HRK.shape[1])
    starts = jnp.array(chunk_starts(S, chunk))
    found = compressed(frequencies_J or frequencies(K), chunk)
    halves_JHR = jnp.split(up_HRK.astype(jnp.float32).transpose(2, 0, 1), 2)

    def some(index, logits_SBTH):
        back_BTHK = turned_back(q_BTHK, angles_SK[starts[index]])
        latents = rk_BSHR, starts[index]
        if pages_BN is not None:
            latents = slots(rk_BSHR, pages_BN, starts[index], chunk), 0
        return _of_chunk(chunk, found, back_BTHK, halves_JHR, *latents, starts[index], logits_SBTH)

    logits_SBTH = jnp.zeros((S, B, T, H), jnp.float32)
    if len(starts) == 1:
        return some(0, logits_SBTH)
    used = jnp.clip((lengths_B.max() + chunk - 1) // chunk, 1, len(starts))
    return jax.lax.fori_loop(0, used, some, logits_SBTH)


def _of_chunk(chunk, found: Compressed, q_BTHK, halves_JHR, rk_BSHR, origin, start, logits_SBTH):
    """`logits_SBTH` with those of the chunk from `start`, from which positions count for q.

    The chunk's latents begin at slot `origin` of `rk_BSHR`.
    """
    q_KBTH1 = jnp.moveaxis(turned_back(q_BTHK, found.middle_K), -1, 0)[..., None]
    a, b = jnp.split(q_KBTH1, 2)
    first, second = (half_JHR[:, None, None] for half_JHR in halves_JHR)
    J, *rest = (a * first).shape
    even_EX = found.even_EJ @ (a * first + b * second).reshape(J, -1)
    odd_OX = found.odd_OJ @ (b * first - a * second).reshape(J, -1)
    n = block = len(found.even_nE)
    # P Q M and the latents that meet it stay in a CPU's cache; of fewer rows than these its product
    # is one thread's.
    while jax.default_backend() == "cpu" and block > 32 and 4 * block * even_EX.shape[1] > KEYS:
        block = (block + 1) // 2
    firsts = jnp.array(chunk_starts(n, block))

    def latents(place):
        """Latents of a block from `place` of the chunk on, [slots, B, 1, H, R]."""
        rk_BbHR = slots(rk_BSHR, None, origin + place, block)
        return rk_BbHR.astype(jnp.float32).swapaxes(0, 1)[:, :, None]

    def some(index, logits_SBTH):
        row = firsts[index]
        even_bBTHR, odd_bBTHR = (
            (jax.lax.dynamic_slice_in_dim(jnp.asarray(left), row, block) @ right).reshape(-1, *rest)
            for left, right in ((found.even_nE, even_EX), (found.odd_nO, odd_OX))
        )
        # An odd chunk's middle mirrors itself: it is written twice, with the same values.
        above, below = chunk // 2 + row, (chunk + 1) // 2 - row - block
        above_bBTHR = (even_bBTHR + odd_bBTHR) * latents(above)
        below_bBTHR = (even_bBTHR - odd_bBTHR)[::-1] * latents(below)
        # The barrier is that of `online.dots`.
        above_bBTHR, below_bBTHR = jax.lax.optimization_barrier((above_bBTHR, below_bBTHR))
        update = jax.lax.dynamic_update_slice_in_dim
        logits_SBTH = update(logits_SBTH, above_bBTHR.sum(-1), start + above, 0)
        return update(logits_SBTH, below_bBTHR.sum(-1), start + below, 0)

    return jax.lax.fori_loop(0, len(firsts), some, logits_SBTH)


def turned_back(q_BTHK, angle_K):
    """The query rotated by minus the angle whose [cos, sin] is given, in float32."""
    a, b = jnp.split(q_BTHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.split(angle_K, 2, axis=-1)
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)
