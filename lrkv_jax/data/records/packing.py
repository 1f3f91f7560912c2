"""Streams of tokens to records of context + 1, each file of them by itself.

Where a record begins in the stream is arithmetic, so the files of a split are written by as many
processes as there are, and are the same whoever writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lrkv_jax.data.records.store import Written, token_features, write_all
from lrkv_jax.data.records.streams import Stream

FILE_BYTES = 1 << 28  # of records in a file, about: TFDS advises 100 MB to some GB
_BLOCK = 1 << 20  # tokens read from the stream at a time


class Piece(NamedTuple):
    """Records `first` to `last` − 1 of a split of `total`, the content of one file."""

    first: int
    last: int
    total: int


def pieces(tokens: int, context: int, *, padded: bool, vocabulary: int) -> list[Piece]:
    """How the records of a stream of so many tokens are divided into files of like size."""
    targets = max(tokens - 1, 0)
    total = -(-targets // context) if padded else targets // context
    bytes_each = (context + 1) * (2 if vocabulary <= 1 << 16 else 4)
    files = max(1, -(-total * bytes_each // FILE_BYTES)) if total else 0
    bounds = [total * n // files for n in range(files + 1)] if files else [0]
    return [Piece(a, b, total) for a, b in zip(bounds, bounds[1:], strict=False)]


def pack(pieces: Iterator[np.ndarray], context: int, padding: int | None) -> Iterator[np.ndarray]:
    """Cuts a token stream into records [context + 1] that overlap by one token.

    pieces: the stream, int [any length] each. padding: the id that fills the last partial record;
    None drops that record. Of n tokens, records keep n − 1 targets (padded) or a multiple of
    context of them (dropped).
    """
    pending = np.empty(0, np.int32)
    for piece in pieces:
        pending = np.concatenate([pending, piece])
        whole = max(len(pending) - 1, 0) // context
        for start in range(0, whole * context, context):
            yield pending[start : start + context + 1]
        pending = pending[whole * context :]
    if padding is not None and len(pending) > 1:
        yield np.pad(pending, (0, context + 1 - len(pending)), constant_values=padding)


def records(
    stream: Stream, piece: Piece, context: int, padding: int | None
) -> Iterator[np.ndarray]:
    """A piece's records [context + 1], in order."""
    start, stop = piece.first * context, min(piece.last * context + 1, len(stream))
    blocks = (stream.read(a, min(a + _BLOCK, stop)) for a in range(start, stop, _BLOCK))
    return pack(blocks, context, padding)


def write_piece(
    path: Path, stream: Stream, piece: Piece, context: int, padding: int | None, vocabulary: int
) -> Written:
    """One file of records; raises OSError where it cannot be written."""
    features = token_features(context + 1, vocabulary)
    return write_all(path, features, records(stream, piece, context, padding))
