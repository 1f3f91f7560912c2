"""Pieces cover a prompt once, in sizes of which there are few."""

import pytest

from lrkv_jax.decode.prompts import batched, pieces


@pytest.mark.parametrize("chunk", [1, 7, 32, 48, 512])
def test_pieces_cover_every_length_once_and_in_order(chunk):
    sizes = set()
    for longest in range(1, 1200):
        cut = pieces(longest, chunk)
        starts = [start for start, _ in cut]
        ends = [start + size for start, size in cut]
        assert starts == [0, *ends[:-1]] and ends[-1] >= longest > starts[-1]
        assert max(size for _, size in cut) <= chunk
        sizes |= {size for _, size in cut}
    # 32, 64, ... below the chunk, and the chunk.
    assert len(sizes) == 1 + sum(32 * 2**k < chunk for k in range(20))


def test_a_short_prompt_costs_little_padding():
    assert pieces(33, 512) == [(0, 64)]
    assert pieces(1030, 512) == [(0, 512), (512, 512), (1024, 32)]


def test_prompts_are_padded_at_the_end_and_unused_rows_are_one_token():
    tokens_BT, lengths_B = batched([[4, 5, 6], [7]], 3, 4)
    assert tokens_BT.tolist() == [[4, 5, 6, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert lengths_B.tolist() == [3, 1, 1]
