"""Interpolated Kneser–Ney bigram: the score a model must beat to have learnt more than pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.loader import Records
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.sources import Split

# h history  w word; counts are of distinct (h, w) pairs, sorted by key = h · V + w
Probability = Callable[[np.ndarray, np.ndarray], np.ndarray]


def kneser_ney_bits_per_byte(
    train_ids: np.ndarray, heldout_ids: np.ndarray, token_bytes: np.ndarray
) -> float:
    """Return the bits per UTF-8 byte of held-out text under a bigram counted on training text.

    train_ids, heldout_ids: int [T], BOS before each document; token_bytes: int [V], 0 for BOS.
    Targets that stand for no bytes (BOS, padding) count neither as bits nor as bytes; they still
    serve as histories. Raises ValueError where nothing is left to score.
    """
    probability = kneser_ney(train_ids, len(token_bytes))
    history, word = heldout_ids[:-1], heldout_ids[1:]
    scored = token_bytes[word] > 0
    if not scored.any():
        raise ValueError("no held-out target stands for a byte")
    history, word = history[scored], word[scored]
    bits = -np.log2(probability(history, word)).sum()
    return float(bits / token_bytes[word].sum(dtype=np.int64))


def kneser_ney(train_ids: np.ndarray, vocabulary: int) -> Probability:
    """p(word | history) of an interpolated Kneser–Ney bigram over all `vocabulary` ids.

    Chen & Goodman (1999), equations 25 to 27 for n = 2: the bigram, discounted, on top of the
    share of distinct histories a word follows, discounted in the same way, on top of the uniform
    distribution. Each level's absolute discount is n1 / (n1 + 2 n2), n1 and n2 being the numbers
    of counts equal to 1 and 2 on that level. The returned function takes int arrays of one shape
    and gives float64 of that shape; it sums to 1 over the words for any history.
    """
    ids = np.asarray(train_ids, np.int64)
    keys, counts = np.unique(ids[:-1] * vocabulary + ids[1:], return_counts=True)
    histories, words = np.divmod(keys, vocabulary)

    # Lower level: in how many distinct contexts each word was seen.
    contexts = np.bincount(words, minlength=vocabulary)
    seen = max(len(keys), 1)
    discount = _discount(contexts)
    kept = np.maximum(contexts - discount, 0)
    # What discounting took is spread evenly; without text this is the uniform distribution.
    lower = kept / seen + (1 - kept.sum() / seen) / vocabulary

    discount = _discount(counts)
    totals = np.bincount(histories, weights=counts, minlength=vocabulary)
    distinct = np.bincount(histories, minlength=vocabulary)
    known = totals > 0
    safe_totals = np.where(known, totals, 1)
    # A history never seen leaves everything to the lower level.
    backoff = np.where(known, discount * distinct / safe_totals, 1.0)

    def probability(history: np.ndarray, word: np.ndarray) -> np.ndarray:
        history, word = np.asarray(history, np.int64), np.asarray(word, np.int64)
        key = history * vocabulary + word
        # The sentinel makes the position of a key beyond the last one valid.
        place = np.searchsorted(keys, key)
        hit = np.append(keys, -1)[place] == key
        count = np.where(hit, np.append(counts, 0)[place], 0)
        higher = np.maximum(count - discount, 0) / safe_totals[history]
        return higher + backoff[history] * lower[word]

    return probability


def _discount(counts: np.ndarray) -> float:
    """n1 / (n1 + 2 n2) (Ney, Essen & Kneser 1994); 1/2 where no count is below 3."""
    once, twice = np.sum(counts == 1), np.sum(counts == 2)
    # With n2 = 0 the estimate is 1, which would leave the words seen once nothing of their own.
    return float(once / (once + 2 * twice)) if once + twice else 0.5


def token_stream(data_config: DataConfig, context: int, split: Split) -> np.ndarray:
    """Join a split's records to one stream again: int32 [records · context + 1].

    The held-out one ends in the padding of its last record. Raises LrkvError as `dataset`.
    """
    records = Records(build_dataset(data_config, context), split)
    rows = records.read(range(len(records)))
    return np.concatenate([rows[:1, 0], rows[:, 1:].ravel()])
