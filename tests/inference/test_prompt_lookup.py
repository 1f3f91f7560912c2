"""A draft is what followed the last tokens when they last stood in the text."""

import numpy as np

from lrkv_jax.inference.prompt_lookup import MATCH, propose


def plain(ids, width):
    tail = ids[-MATCH:]
    for end in range(len(ids) - 1, MATCH - 1, -1):
        if ids[end - MATCH : end] == tail:
            period = ids[end:]
            return [period[i % len(period)] for i in range(width)]
    return None


def test_drafts_are_those_of_a_search_from_the_end():
    random = np.random.default_rng(0)
    texts = [random.integers(0, 3, n).tolist() for n in (1, 3, 4, 5, 6, 9, 14, 20, 33, 40)]
    texts += [[7] * 12, [1, 2] * 8, list(range(30))]
    ids_BL = random.integers(0, 3, (len(texts), 40))  # what lies past a text's end is not its own
    for row, text in enumerate(texts):
        ids_BL[row, : len(text)] = text
    draft_BW, found_B = propose(ids_BL, np.array([len(text) for text in texts]), 7)
    expected = [plain(text, 7) for text in texts]
    assert found_B.tolist() == [draft is not None for draft in expected]
    assert 4 <= found_B.sum() <= 10
    for row, draft in enumerate(expected):
        assert draft is None or draft_BW[row].tolist() == draft
