"""Split a ragged batch evenly over a fixed number of workers, and join their results.

All tiles of all sequences lie in one row, cut into equal runs, one per worker: a batch of one long
and many short sequences keeps every multiprocessor busy to the end. Where a run crosses from one
sequence into the next, a new segment begins. Shapes are static; lengths are data.

B batch  W workers  J segments  N columns (a head's queries)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lrkv_jax.kernels.online import MASKED

TILE = 64  # tokens; the M of Hopper's warpgroup products, and the page of a paged cache
# A shorter run costs more in joining than it saves: partial sums are about 6 tokens' bytes.
LEAST_TILES = 4


class Work(NamedTuple):
    """Worker w handles tiles `begin_W` to `end_W` − 1 of the row, in `segments_W` sequences.

    The first of them is `sequence_W`; sequence b's tiles begin at `start_B`[b] and end before
    `start_B`[b + 1]. The results of worker w on sequence b go to segment w + b: along the row
    either w or b grows by one, so that no two share a place.
    """

    begin_W: jax.Array
    end_W: jax.Array
    sequence_W: jax.Array
    segments_W: jax.Array
    start_B: jax.Array  # [B + 1]
    run: jax.Array  # tiles of every run but the last

    @property
    def places(self):
        """J, of which some stay unused."""
        return len(self.begin_W) + len(self.start_B) - 1


def split(lengths_B, workers):
    """Cut the row of tiles into runs of equal length for `workers`."""
    tiles_B = -(-jnp.maximum(lengths_B, 0) // TILE)
    start_B = jnp.concatenate([jnp.zeros(1, tiles_B.dtype), jnp.cumsum(tiles_B)])
    total = start_B[-1]
    run = jnp.maximum(-(-total // workers), LEAST_TILES)
    begin_W = jnp.minimum(jnp.arange(workers) * run, total)
    end_W = jnp.minimum(begin_W + run, total)
    sequence_W = (start_B[1:] <= begin_W[:, None]).sum(axis=1)
    reached_W = (start_B[:-1] < end_W[:, None]).sum(axis=1)
    segments_W = jnp.where(begin_W < end_W, reached_W - sequence_W, 0)
    return Work(
        *(a.astype(jnp.int32) for a in (begin_W, end_W, sequence_W, segments_W, start_B, run))
    )


def join(work, sums_JX, peak_JN, total_JN):
    """Softmax averages [B, ..., N] and log-sum-exps [B, ..., N] from the segments' sums.

    `sums_JX` [J, ..., N] is unnormalised; `peak_JN` is a segment's largest logit times log2(e),
    `total_JN` its sum of 2^(logit − peak). A query that sees nothing gets 0 and MASKED.
    """
    B, places = len(work.start_B) - 1, jnp.arange(work.places)
    first_B = jnp.arange(B) + work.start_B[:-1] // work.run
    last_B = jnp.arange(B) + (work.start_B[1:] - 1) // work.run
    last_B = jnp.where(work.start_B[1:] > work.start_B[:-1], last_B, -1)
    sequence_J = (first_B <= places[:, None]).sum(axis=1) - 1
    used_J = places <= last_B[sequence_J]

    def used(array, otherwise):
        # Unused places were never written.
        return jnp.where(used_J.reshape(-1, *[1] * (array.ndim - 1)), array, otherwise)

    put = {"num_segments": B, "indices_are_sorted": True}
    peak_BN = jax.ops.segment_max(used(peak_JN, MASKED), sequence_J, **put)
    peak_BN = jnp.maximum(peak_BN, MASKED)  # a sequence without a segment has −inf here
    weight_JN = used(jnp.exp2(peak_JN - peak_BN[sequence_J]), 0.0)
    total_BN = jax.ops.segment_sum(used(total_JN, 0.0) * weight_JN, sequence_J, **put)
    safe_BN = jnp.where(total_BN > 0, total_BN, 1.0)
    extra = tuple(range(peak_JN.ndim - 1, sums_JX.ndim - 1))
    weighted_JX = used(sums_JX, 0.0) * jnp.expand_dims(weight_JN, extra)
    sums_BX = jax.ops.segment_sum(weighted_JX, sequence_J, **put)
    lse_BN = jnp.where(total_BN > 0, (peak_BN + jnp.log2(safe_BN)) * jnp.log(2.0), MASKED)
    return sums_BX / jnp.expand_dims(safe_BN, extra), lse_BN
