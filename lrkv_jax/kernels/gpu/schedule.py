"""Split a ragged batch into pieces, and the pieces over a fixed number of workers.

Each sequence is cut at multiples of `PIECE` tiles and nowhere else, so that how its results are
rounded depends on the sequence alone. Shapes are static; lengths are data.

B batch  Z workers  Y places of pieces
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64  # tokens; the M of Hopper's warpgroup products, and the page of a paged cache
PIECE = 8  # tiles; experiments/results/NOTES.md has the estimate


class PieceSchedule(NamedTuple):
    """The pieces of each worker: a piece is a run of tiles of one sequence.

    The piece of place j is `tiles_Y`[j] tiles of sequence `sequence_Y`[j], from its tile
    `first_Y`[j] on. Worker w does the `count_Z`[w] pieces from place `begin_Z`[w] on, and sequence
    b has the `pieces_B`[b] pieces from place `place_B`[b] on, in the order of its tokens.
    """

    begin_Z: jax.Array
    count_Z: jax.Array
    place_B: jax.Array
    pieces_B: jax.Array
    sequence_Y: jax.Array
    first_Y: jax.Array
    tiles_Y: jax.Array


def split(lengths_B, workers, slots):
    """The `PieceSchedule` of sequences of these lengths, of up to `slots` tokens.

    A sequence's last piece may be shorter than the others. A worker does the pieces that begin in
    its equal share of all tiles.
    """
    tiles_B = -(-jnp.maximum(lengths_B, 0) // TILE)
    start_B = jnp.cumsum(tiles_B) - tiles_B
    B, total = len(tiles_B), tiles_B.sum()
    pieces_B = -(-tiles_B // PIECE)
    end_B = jnp.cumsum(pieces_B)
    place_B = end_B - pieces_B
    places_Y = jnp.arange(B * -(-slots // (TILE * PIECE)))
    sequence_Y = jnp.minimum((end_B <= places_Y[:, None]).sum(axis=1), B - 1)
    first_Y = (places_Y - place_B[sequence_Y]) * PIECE
    tiles_Y = jnp.clip(tiles_B[sequence_Y] - first_Y, 0, PIECE)
    worker_Y = (start_B[sequence_Y] + first_Y) // jnp.maximum(-(-total // workers), 1)
    worker_Y = jnp.where(tiles_Y > 0, worker_Y, workers)
    begin_Z = (worker_Y < jnp.arange(workers)[:, None]).sum(axis=1)
    count_Z = (worker_Y == jnp.arange(workers)[:, None]).sum(axis=1)
    parts = begin_Z, count_Z, place_B, pieces_B, sequence_Y, first_Y, tiles_Y
    return PieceSchedule(*(part.astype(jnp.int32) for part in parts))
