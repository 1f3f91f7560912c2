"""Work split over workers covers every tile once, and its pieces depend on one sequence alone."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.kernels.gpu import schedule
from lrkv_jax.kernels.gpu.schedule import PIECE, TILE

SLOTS = 5000
# A shape is then one program, not one for each operation.
_split = jax.jit(schedule.split, static_argnums=(1, 2))

# Few shapes: each is a program to compile.
LENGTH = st.sampled_from([0, 1, 63, 64, 65, 128, 300, 512, 513, 1000, SLOTS])
WORKERS = st.sampled_from([1, 16])


def split(lengths, workers):
    return jax.tree.map(np.asarray, _split(np.array(lengths), workers, SLOTS))


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(LENGTH, min_size=6, max_size=6), workers=WORKERS)
def test_every_tile_is_done_once_in_order_and_no_worker_does_more_than_its_share(lengths, workers):
    work = split(lengths, workers)
    load, done = np.zeros(workers, int), {}
    for w, (begin, count) in enumerate(zip(work.begin_Z, work.count_Z, strict=True)):
        for j in range(begin, begin + count):
            assert j not in done and work.tiles_Y[j] > 0
            done[j] = work.sequence_Y[j], work.first_Y[j], work.first_Y[j] + work.tiles_Y[j]
            load[w] += work.tiles_Y[j]
    for b, n in enumerate(lengths):
        end = 0
        for j in range(work.place_B[b], work.place_B[b] + work.pieces_B[b]):
            sequence, first, last = done.pop(j)
            assert (sequence, first) == (b, end)
            end = last
        assert end == -(-n // TILE)
    assert not done
    assert load.max() <= -(-sum(-(-n // TILE) for n in lengths) // workers) + PIECE - 1


@settings(max_examples=25, deadline=None)
@given(length=LENGTH, others=st.lists(LENGTH, min_size=5, max_size=5), place=st.integers(0, 5),
       workers=WORKERS)  # fmt: skip
def test_pieces_of_a_sequence_depend_on_its_length_alone(length, others, place, workers):
    def cut(lengths, place, workers):
        work = split(lengths, workers)
        own = slice(work.place_B[place], work.place_B[place] + work.pieces_B[place])
        return list(zip(work.first_Y[own], work.tiles_Y[own], strict=True))

    assert cut([*others[:place], length, *others[place:]], place, workers) == cut([length], 0, 1)
