"""Work split over workers covers every tile once, evenly, and its parts join to the whole."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.kernels.split_kv import schedule
from lrkv_jax.kernels.split_kv.schedule import LEAST_TILES, TILE

# A shape is then one program, not one for each operation.
split = jax.jit(schedule.split, static_argnums=1)
join = jax.jit(schedule.join)

# Few shapes: each is a program to compile.
LENGTHS = st.sampled_from([1, 6]).flatmap(
    lambda size: st.lists(
        st.sampled_from([0, 1, 63, 64, 65, 128, 300, 1000, 5000]), min_size=size, max_size=size
    )
)
WORKERS = st.sampled_from([1, 16])


def segments(work):
    """(worker, sequence, first tile, last tile) of each segment, as the kernel walks them."""
    begin, end, first, count, start = (np.asarray(part) for part in work[:5])
    for w in range(len(begin)):
        for b in range(first[w], first[w] + count[w]):
            a, z = max(begin[w], start[b]) - start[b], min(end[w], start[b + 1]) - start[b]
            if z > a:
                yield w, b, a, z


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, workers=WORKERS)
def test_every_tile_is_done_once_and_no_worker_does_more_than_its_share(lengths, workers):
    work = split(np.array(lengths), workers)
    tiles = [-(-n // TILE) for n in lengths]
    done = [np.zeros(n, int) for n in tiles]
    load, places = np.zeros(workers, int), set()
    for w, b, a, z in segments(work):
        done[b][a:z] += 1
        load[w] += z - a
        places.add(w + b)
    assert all((d == 1).all() for d in done)
    assert load.max() <= max(LEAST_TILES, -(-sum(tiles) // workers))
    assert len(places) == len(list(segments(work)))
    assert max(places, default=0) < work.places


@settings(max_examples=24, deadline=None)
@given(lengths=LENGTHS, workers=WORKERS, seed=st.integers(0, 99))
def test_segments_join_to_the_softmax_of_the_whole(lengths, workers, seed):
    rng = np.random.default_rng(seed)
    work = split(np.array(lengths), workers)
    X, N = 3, 2
    # Places that no segment writes hold what memory held.
    sums = np.full((work.places, X, N), np.nan)
    peak, total = np.full((work.places, N), np.nan), np.full((work.places, N), np.nan)
    logits = [5 * rng.standard_normal((n, N)) for n in lengths]
    values = [rng.standard_normal((n, X)) for n in lengths]
    for w, b, a, z in segments(work):
        own = slice(a * TILE, z * TILE)
        base2 = logits[b][own] * np.log2(np.e)
        weights = np.exp2(base2 - base2.max(0))
        peak[w + b], total[w + b] = base2.max(0), weights.sum(0)
        sums[w + b] = values[b][own].T @ weights
    mean, lse = join(work, *(np.float32(a) for a in (sums, peak, total)))
    for b, n in enumerate(lengths):
        if n == 0:
            assert not np.asarray(mean[b]).any()
            assert (np.asarray(lse[b]) == np.float32(-1e30)).all()
            continue
        weights = np.exp(logits[b] - logits[b].max(0))
        np.testing.assert_allclose(mean[b], values[b].T @ weights / weights.sum(0), atol=2e-6)
        expected = logits[b].max(0) + np.log(weights.sum(0))
        np.testing.assert_allclose(lse[b], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("workers", [132, 264])
def test_one_long_sequence_among_short_ones_is_spread_over_all_workers(workers):
    work = split(np.array([65_536, *[64] * 7]), workers)
    load = np.asarray(work.end_W - work.begin_W)
    assert load.max() == -(-(1024 + 7) // workers)
    assert (load > 0).mean() > 0.95
