"""The token stream of a shard of the source: one file, or small ones together.

A stream hangs on the text and the tokenizer alone. Records of any context are cut from it
(`lrkv_jax.data.records.packing`), so what is costly is done once, one shard at a time, and a build
that was killed goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.store import (
    TokenRows,
    TokenWriter,
    appearing,
    check_complete,
    describe,
    file_name,
    open_dataset,
    token_features,
)
from lrkv_jax.data.sources import SPLITS, Row, Split, checksum, file_identities, rows
from lrkv_jax.data.tokenizer import Tokenizer

FORMAT = 1  # raise it when the stream of the same input changes
CHUNK = 1 << 16  # tokens in a row of a stream's file
_TEXT_CHUNK = 1 << 20  # characters: enough to keep the tokenizers' threads busy, little memory

Report = Callable[[dict[str, int]], None]  # documents, tokens, place (bytes of input), so far


def share_of(config: DataConfig) -> float:
    """The share of documents that are held out: none where whole files are."""
    return 0.0 if config.heldout_shards else config.heldout


def tokenise(
    config: DataConfig, names: Sequence[str], tokenizer: Tokenizer, report: Report
) -> Iterator[tuple[Split, np.ndarray] | dict[str, Any]]:
    """The files' tokens in order, int [any length] a piece, BOS before each document.

    After each file's pieces comes its entry: name, size, sha256, rows, and documents, tokens (BOS
    included) and UTF-8 bytes in each split. Raises LrkvError as `sources.rows`.
    """
    bos = np.array([tokenizer.bos], np.int32)
    before = {"documents": 0, "tokens": 0, "place": 0}

    def after(entry: dict[str, Any], place: int) -> dict[str, int]:
        """The totals where so much of a file is done."""
        here = {key: sum(entry[split][key] for split in SPLITS) for key in ("documents", "tokens")}
        return {key: before[key] + more for key, more in (here | {"place": place}).items()}

    for name in names:
        size, sha256 = checksum(config.source, name)
        entry: dict[str, Any] = {"name": name, "size": size, "sha256": sha256, "rows": 0}
        entry |= {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
        found = rows(config.source, name, text_column=config.text_column, heldout=share_of(config))
        for chunk in _chunks(found):
            entry["rows"] += len(chunk)
            for split in SPLITS:
                texts = [row.text for row in chunk if row.text and row.split == split]
                if not texts:
                    continue
                encoded = tokenizer.encode_batch(texts)
                ids = np.concatenate([part for document in encoded for part in (bos, document)])
                counts = entry[split]
                counts["documents"] += len(texts)
                counts["tokens"] += len(ids)
                counts["bytes"] += int(tokenizer.token_bytes[ids].sum(dtype=np.int64))
                yield split, ids
            report(after(entry, chunk[-1].place))
        before = after(entry, size)
        report(before)
        yield entry


def _chunks(found: Iterator[Row]) -> Iterator[list[Row]]:
    """Lists of rows of about `_TEXT_CHUNK` characters together."""
    for first in found:
        chunk, size = [first], len(first.text)
        while size < _TEXT_CHUNK and (more := next(found, None)) is not None:
            chunk.append(more)
            size += len(more.text)
        yield chunk


def stream_folder(config: DataConfig, names: Sequence[str], tokenizer: Tokenizer) -> Path:
    """Where a shard's stream is kept: named after all that decides it."""
    identity = [
        FORMAT, CHUNK, file_identities(config.source, list(names)), config.text_column,
        share_of(config), tokenizer.fingerprint,
    ]  # fmt: skip
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    readable = Path(names[0]).name[:60]
    return Path(config.directory) / "streams" / f"{readable}-{fingerprint}"


def build_stream(
    config: DataConfig, names: Sequence[str], tokenizer: Tokenizer, report: Report
) -> Path:
    """The folder of a shard's stream, built if it is not there; it appears whole or not at all.

    Raises LrkvError as `tokenise` and `check_complete` do, and OSError where it cannot be written.
    """
    target = stream_folder(config, names, tokenizer)
    if target.exists():
        check_complete(target)
        return target
    features = token_features(CHUNK, tokenizer.vocabulary)
    splits = SPLITS if share_of(config) else SPLITS[:1]
    with appearing(target) as scratch:
        writers = {s: _Cut(scratch / file_name(s, 0, 1), features, tokenizer.bos) for s in splits}
        files = []
        for piece in tokenise(config, names, tokenizer, report):
            if isinstance(piece, dict):
                files.append(piece)
            else:
                writers[piece[0]].add(piece[1])
        metadata = {
            "format": FORMAT,
            "files": files,
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
        }
        written = {split: [writer.close()] for split, writer in writers.items()}
        described = "A stream of tokens in rows; the last one of a split is filled with BOS."
        describe(scratch, features, written, description=described, metadata=metadata)
    return target


class _Cut:
    """Writes a stream as rows of CHUNK tokens, at least one, the last of them filled up."""

    def __init__(self, path: Path, features: Any, bos: int):
        self._writer = TokenWriter(path, features)
        self._bos = bos
        self._pending: list[np.ndarray] = []
        self._size = 0

    def add(self, ids: np.ndarray) -> None:
        self._pending.append(ids)
        self._size += len(ids)
        if self._size >= CHUNK:
            joined = np.concatenate(self._pending)
            whole = len(joined) // CHUNK * CHUNK
            for row in joined[:whole].reshape(-1, CHUNK):
                self._writer.write(row)
            self._pending, self._size = [joined[whole:]], len(joined) - whole

    def close(self) -> Any:
        rest = np.concatenate([*self._pending, np.empty(0, np.int32)])
        self._writer.write(np.pad(rest, (0, CHUNK - len(rest)), constant_values=self._bos))
        return self._writer.close()


class Stream(Protocol):
    """Tokens by place."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """int [stop − start]."""
        ...


class InMemory:
    """A stream that is an array."""

    def __init__(self, pieces: Sequence[np.ndarray]):
        self._tokens = np.concatenate([np.empty(0, np.int32), *pieces])

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]


class OnDisk:
    """Some shards' streams, joined: (folder, split) of each, in order."""

    def __init__(self, parts: Sequence[tuple[Path, Split]]):
        self._rows, lengths = [], []
        for folder, split in parts:
            files = open_dataset(folder).info.metadata["files"]
            lengths.append(sum(file[split]["tokens"] for file in files))
            self._rows.append(TokenRows(folder, split) if lengths[-1] else None)
        self._starts = [0, *itertools.accumulate(lengths)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        found = [np.empty(0, np.int32)]
        while start < stop:
            shard = bisect_right(self._starts, start) - 1
            row, place = divmod(start - self._starts[shard], CHUNK)
            here = min(stop, self._starts[shard + 1]) - start
            piece = self._rows[shard][row][place : place + here]
            found.append(piece)
            start += len(piece)
        return np.concatenate(found)
