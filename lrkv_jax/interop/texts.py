"""The texts that a conversion learns from, and those that it is measured on.

U = T + 1 ids of a record
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from lrkv_jax.config import RunConfig
from lrkv_jax.data.loader import heldout_batches, make_loader
from lrkv_jax.data.sources import docstrings
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.errors import LrkvError

OWN, SECOND = "own", "docstrings"
HELD_OUT = 5  # of a text that is given whole, one part in so many is held out


@dataclass(frozen=True)
class TextRecords:
    """Records of one text: some to learn from, others to measure on."""

    name: str
    learnt_NU: Int[np.ndarray, "N U"]
    heldout_NU: Int[np.ndarray, "N U"]


def texts(
    names: Sequence[str],
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    context: int,
    learnt: int,
    heldout: int,
) -> Iterator[TextRecords]:
    """Each text's records of `context` tokens: up to `learnt` tokens of one part of it,
    and up to `heldout` of another.

    "own" is the run's training and held-out split, "docstrings" those of Python's standard library
    (modules of its two halves), and every other name a file of text, whose last fifth is held out.
    Raises `LrkvError` for a file that cannot be read, or that is too short.
    """
    rows = [max(1, count // context) for count in (learnt, heldout)]
    for name in names:
        if name == OWN:
            loader = make_loader(config.data, context, rows[0])
            batches = heldout_batches(config.data, context, 1, some=rows[1])
            yield TextRecords(name, loader.whole_batch_at(0), np.concatenate(list(batches)))
            continue
        documents = docstrings() if name == SECOND else [_read(name)]
        ids = [np.array([tokenizer.bos, *one]) for one in tokenizer.encode_batch(documents)]
        if name == SECOND:
            parts = np.concatenate(ids[::2]), np.concatenate(ids[1::2])
        else:
            (whole,) = ids
            cut = len(whole) * (HELD_OUT - 1) // HELD_OUT
            parts = whole[:cut], whole[cut:]
        if min(map(len, parts)) <= context:
            raise LrkvError(
                f"{name} has {sum(map(len, parts))} tokens, and one part in {HELD_OUT} of it must "
                f"be longer than {context}: give a longer text, or a smaller --context"
            )
        yield TextRecords(
            name, *(_records(p, context, n) for p, n in zip(parts, rows, strict=True))
        )


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LrkvError(f"--text {name} cannot be read as text ({error})") from error


def _records(ids_N: np.ndarray, context: int, most: int) -> Int[np.ndarray, "N U"]:
    """Records spread evenly over the ids, each beginning with the last id of the one before."""
    count = (len(ids_N) - 1) // context
    chosen = [number * count // min(most, count) for number in range(min(most, count))]
    records = [ids_N[at * context : (at + 1) * context + 1] for at in chosen]
    return np.stack(records).astype(np.int32)
