"""Promises of the Kneser–Ney bigram, against a direct count and the laws of probability."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bigram import kneser_ney, kneser_ney_bits_per_byte, token_stream

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.tokenizer import load_tokenizer

streams = st.lists(st.integers(0, 6), max_size=60)


def reference(train, vocabulary):
    """p(w | h) in loops and dictionaries, straight from the definition."""
    pairs = Counter(zip(train, train[1:], strict=False))
    contexts, followers, totals = Counter(), defaultdict(set), Counter()
    for (h, w), count in pairs.items():
        contexts[w] += 1
        followers[h].add(w)
        totals[h] += count

    def discount(counts):
        n1, n2 = (sum(c == n for c in counts) for n in (1, 2))
        return n1 / (n1 + 2 * n2) if n1 + n2 else 0.5

    low, high = discount(contexts.values()), discount(pairs.values())

    def lower(w):
        if not pairs:
            return 1 / vocabulary
        spread = sum(min(low, c) for c in contexts.values()) / len(pairs)
        return max(contexts[w] - low, 0) / len(pairs) + spread / vocabulary

    def probability(h, w):
        if not totals[h]:
            return lower(w)
        kept = max(pairs[h, w] - high, 0) / totals[h]
        return kept + high * len(followers[h]) / totals[h] * lower(w)

    return probability


@given(streams)
def test_probabilities_equal_a_direct_count_and_sum_to_one(train):
    history, word = np.indices((8, 8))
    p = kneser_ney(np.array(train, np.int32), 8)(history, word)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
    expected = reference(train, 8)
    by_loop = [[expected(h, w) for w in range(8)] for h in range(8)]
    np.testing.assert_allclose(p, by_loop, atol=1e-12)


def test_a_tiny_case_by_hand():
    train = np.array([0, 1, 2, 0, 1, 2, 1, 2, 3])
    # Pairs 01 ×2, 12 ×3, 20, 21, 23: n1 = 3, n2 = 1, discount 3/5. Histories before 0, 1, 2, 3:
    # 1, 2, 1, 1 of 5: n1 = 3, n2 = 1, discount 3/5 again, spread over the 5 ids.
    p = kneser_ney(train, 5)
    spread = 4 * 0.6 / 5 / 5
    lower_one, lower_four = (2 - 0.6) / 5 + spread, spread
    assert math.isclose(p(0, 1), (2 - 0.6) / 2 + 0.6 / 2 * lower_one)
    assert math.isclose(p(0, 4), 0.6 / 2 * lower_four)
    assert math.isclose(p(2, 1), (1 - 0.6) / 3 + 0.6 * lower_one)
    assert math.isclose(p(4, 1), lower_one)


def test_targets_without_bytes_count_neither_as_bits_nor_as_bytes():
    train = np.array([0, 1, 2, 0, 1, 2, 1, 2, 3])
    token_bytes = np.array([0, 2, 3, 1, 1])
    p = reference(train.tolist(), 5)
    heldout = np.array([0, 1, 0, 2, 4, 0, 0])
    scored = [(0, 1), (0, 2), (2, 4)]
    expected = -sum(math.log2(p(h, w)) for h, w in scored) / (2 + 3 + 1)
    assert math.isclose(kneser_ney_bits_per_byte(train, heldout, token_bytes), expected)


def test_nothing_to_score_is_an_error():
    with pytest.raises(ValueError, match="no held-out target"):
        kneser_ney_bits_per_byte(np.array([0, 1]), np.array([1, 0, 0]), np.array([0, 1]))


def test_large_ids_do_not_overflow():
    ids = np.array([50_000, 50_001, 50_000, 50_001], np.uint16)
    p = kneser_ney(ids, 50_304)
    assert p(np.array(50_000), np.array(50_001)) > 0.5


def test_the_embedded_corpus_scores_about_1_94_bits_per_byte(data_directory):
    tokenizer, data = load_tokenizer("sotu-4096"), DataConfig(directory=str(data_directory))
    streams = [token_stream(data, 256, split) for split in ("train", "heldout")]
    score = kneser_ney_bits_per_byte(*streams, tokenizer.token_bytes)
    assert score == pytest.approx(1.9383, abs=2e-3)
