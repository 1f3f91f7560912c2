"""Split a ragged batch over a fixed number of workers.

All tiles of all sequences lie in one row, which is shared out to the workers in pieces. "fast" cuts
it into equal runs, one per worker: a batch of one long and many short sequences keeps every
multiprocessor busy to the end. Where a run crosses into the next sequence, a new piece begins.
"exact" cuts each sequence at multiples of `PIECE` tiles and nowhere else, so that how its results
are rounded depends on the sequence alone. Shapes are static; lengths are data.

B batch  W workers  J places of pieces
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64  # tokens; the M of Hopper's warpgroup products, and the page of a paged cache
# A shorter run costs more in joining than it saves: partial sums are about 6 tokens' bytes.
LEAST_TILES = 4
PIECE = 8  # tiles of an exact piece; docs/decode.md has the estimate
BITS = ("fast", "exact")


class Work(NamedTuple):
    """Who does what: a piece is a run of tiles of one sequence, and has a place of its own.

    The piece of place j is `tiles_J`[j] tiles of sequence `sequence_J`[j], from its tile
    `first_J`[j] on. Worker w does the `count_W`[w] pieces from place `begin_W`[w] on, and sequence
    b has the `pieces_B`[b] pieces from place `place_B`[b] on, in the order of its tokens.
    """

    begin_W: jax.Array
    count_W: jax.Array
    place_B: jax.Array
    pieces_B: jax.Array
    sequence_J: jax.Array
    first_J: jax.Array
    tiles_J: jax.Array


def split(lengths_B, workers, slots, bits):
    """The `Work` of sequences of these lengths, of up to `slots` tokens, in "fast" or "exact"."""
    tiles_B = -(-jnp.maximum(lengths_B, 0) // TILE)
    start_B = jnp.concatenate([jnp.zeros(1, tiles_B.dtype), jnp.cumsum(tiles_B)])
    parts = _fixed(tiles_B, start_B, workers, slots) if bits == "exact" else _even(start_B, workers)
    return Work(*(part.astype(jnp.int32) for part in parts))


def _even(start_B, workers):
    """Runs of equal length. The piece of worker w in sequence b has place w + b.

    Along the row either w or b grows by one, so that no two pieces share a place, of which some
    stay unused.
    """
    B, total = len(start_B) - 1, start_B[-1]
    run = jnp.maximum(-(-total // workers), LEAST_TILES)
    begin_W = jnp.minimum(jnp.arange(workers) * run, total)
    end_W = jnp.minimum(begin_W + run, total)
    sequence_W = (start_B[1:] <= begin_W[:, None]).sum(axis=1)
    reached_W = (start_B[:-1] < end_W[:, None]).sum(axis=1)
    count_W = jnp.where(begin_W < end_W, reached_W - sequence_W, 0)
    place_B = jnp.arange(B) + start_B[:-1] // run
    last_B = jnp.arange(B) + (start_B[1:] - 1) // run
    pieces_B = jnp.where(start_B[1:] > start_B[:-1], last_B - place_B + 1, 0)
    places_J = jnp.arange(workers + B)
    sequence_J = (place_B <= places_J[:, None]).sum(axis=1) - 1
    worker_J = jnp.minimum(places_J - sequence_J, workers - 1)
    first_J = jnp.maximum(begin_W[worker_J] - start_B[sequence_J], 0)
    last_J = jnp.minimum(end_W[worker_J], start_B[sequence_J + 1]) - start_B[sequence_J]
    tiles_J = jnp.maximum(last_J - first_J, 0)
    begin_W = jnp.arange(workers) + sequence_W
    return begin_W, count_W, place_B, pieces_B, sequence_J, first_J, tiles_J


def _fixed(tiles_B, start_B, workers, slots):
    """Pieces of `PIECE` tiles, a sequence's last one shorter, one after the other.

    A piece is done by the worker in whose equal share of the row it begins.
    """
    B, total = len(tiles_B), start_B[-1]
    pieces_B = -(-tiles_B // PIECE)
    end_B = jnp.cumsum(pieces_B)
    place_B = end_B - pieces_B
    places_J = jnp.arange(B * -(-slots // (TILE * PIECE)))
    sequence_J = jnp.minimum((end_B <= places_J[:, None]).sum(axis=1), B - 1)
    first_J = (places_J - place_B[sequence_J]) * PIECE
    tiles_J = jnp.clip(tiles_B[sequence_J] - first_J, 0, PIECE)
    worker_J = (start_B[sequence_J] + first_J) // jnp.maximum(-(-total // workers), 1)
    worker_J = jnp.where(tiles_J > 0, worker_J, workers)
    begin_W = (worker_J < jnp.arange(workers)[:, None]).sum(axis=1)
    count_W = (worker_J == jnp.arange(workers)[:, None]).sum(axis=1)
    return begin_W, count_W, place_B, pieces_B, sequence_J, first_J, tiles_J
