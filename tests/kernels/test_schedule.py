"""Work split over workers covers every tile once, evenly, and its parts join to the whole."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.kernels.gpu import schedule
from lrkv_jax.kernels.gpu.schedule import BITS, LEAST_TILES, PIECE, TILE

SLOTS = 5000
# A shape is then one program, not one for each operation.
_split = jax.jit(schedule.split, static_argnums=(1, 2, 3))

# Few shapes: each is a program to compile.
LENGTH = st.sampled_from([0, 1, 63, 64, 65, 128, 300, 512, 513, 1000, SLOTS])
LENGTHS = st.sampled_from([1, 6]).flatmap(
    lambda size: st.lists(LENGTH, min_size=size, max_size=size)
)
WORKERS = st.sampled_from([1, 16])


def split(lengths, workers, bits, slots=SLOTS):
    return jax.tree.map(np.asarray, _split(np.array(lengths), workers, slots, bits))


def pieces(work):
    """(worker, place, sequence, first tile, end) of each piece, as the kernel walks them."""
    for w, (begin, count) in enumerate(zip(work.begin_W, work.count_W, strict=True)):
        for j in range(begin, begin + count):
            if work.tiles_J[j]:
                first = work.first_J[j]
                yield w, j, work.sequence_J[j], first, first + work.tiles_J[j]


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, workers=WORKERS, bits=st.sampled_from(BITS))
def test_every_tile_is_done_once_and_no_worker_does_more_than_its_share(lengths, workers, bits):
    work = split(lengths, workers, bits)
    tiles = [-(-n // TILE) for n in lengths]
    done = [np.zeros(n, int) for n in tiles]
    load, places = np.zeros(workers, int), []
    for w, j, b, a, z in pieces(work):
        done[b][a:z] += 1
        load[w] += z - a
        places.append(j)
    assert all((d == 1).all() for d in done)
    share = -(-sum(tiles) // workers)
    assert load.max() <= (max(LEAST_TILES, share) if bits == "fast" else share + PIECE - 1)
    assert len(set(places)) == len(places)
    assert max(places, default=0) < len(work.tiles_J)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, workers=WORKERS, bits=st.sampled_from(BITS))
def test_a_sequences_pieces_lie_one_after_the_other_in_the_order_of_its_tokens(
    lengths, workers, bits
):
    work = split(lengths, workers, bits)
    done = {j: (b, a, z) for _, j, b, a, z in pieces(work)}
    for b, n in enumerate(lengths):
        own = range(work.place_B[b], work.place_B[b] + work.pieces_B[b])
        end = 0
        for j in own:
            sequence, a, z = done.pop(j)
            assert (sequence, a) == (b, end)
            end = z
        assert end == -(-n // TILE)
    assert not done


@settings(max_examples=40, deadline=None)
@given(length=LENGTH, others=st.lists(LENGTH, min_size=5, max_size=5), place=st.integers(0, 5),
       workers=WORKERS)  # fmt: skip
def test_exact_pieces_of_a_sequence_depend_on_its_length_alone(length, others, place, workers):
    def cut(lengths, place, workers):
        work = split(lengths, workers, "exact")
        own = slice(work.place_B[place], work.place_B[place] + work.pieces_B[place])
        return list(zip(work.first_J[own], work.tiles_J[own], strict=True))

    assert cut([*others[:place], length, *others[place:]], place, workers) == cut([length], 0, 1)


@pytest.mark.parametrize("workers", [132, 264])
def test_one_long_sequence_among_short_ones_is_spread_over_all_workers(workers):
    work = split([65_536, *[64] * 7], workers, "fast", 65_536)
    load = np.zeros(workers, int)
    for w, _, _, a, z in pieces(work):
        load[w] += z - a
    assert load.max() == -(-(1024 + 7) // workers)
    assert (load > 0).mean() > 0.95
