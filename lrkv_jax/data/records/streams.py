"""Text to streams of tokens, shard by shard; streams to records of context + 1 tokens.

The stream of a shard (one file, or small ones together) depends on the text and the tokenizer
alone. Records of any context are cut from it, so the costly part is done once, and a build that was
killed continues with the shards that are missing. Where a record begins in the stream is
arithmetic, so a split's files are written by as many processes as there are, and are the same
whoever writes them.
"""

import hashlib
import itertools
import json
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.folders import (
    TokenRows,
    TokenWriter,
    built,
    describe,
    file_name,
    token_features,
    write_file,
)
from lrkv_jax.data.sources import SPLITS, Document, Split, checksum, file_identities, rows
from lrkv_jax.data.tokenizer import Tokenizer

FORMAT = 1  # raise it when the stream of the same input changes
CHUNK = 1 << 16  # tokens in a row of a stream's file
_TEXT_CHUNK = 1 << 20  # characters: enough to keep the tokenizers' threads busy, little memory
FILE_BYTES = 1 << 28  # of records in a file, about: TFDS advises 100 MB to some GB
_BLOCK = 1 << 20  # tokens read from the stream at a time

Report = Callable[[dict[str, int]], None]  # documents, tokens, place (bytes of input), so far


def share_of(config: DataConfig) -> float:
    """The share of documents that are held out; 0 if whole files are."""
    return 0.0 if config.heldout_shards else config.heldout


def tokenise(
    config: DataConfig, names: Sequence[str], tokenizer: Tokenizer, report: Report
) -> Iterator[tuple[Split, np.ndarray] | dict[str, Any]]:
    """Yield the files' tokens in order, int [any length] each, with BOS before each document.

    After each file's pieces comes its entry: name, size, sha256, rows, and documents, tokens (BOS
    included) and UTF-8 bytes in each split. Raises LrkvError as `sources.rows`.
    """
    bos = np.array([tokenizer.bos], np.int32)
    before = {"documents": 0, "tokens": 0, "place": 0}

    def after(entry: dict[str, Any], place: int) -> dict[str, int]:
        """The totals after this much of a file."""
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


def _chunks(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Lists of rows of about `_TEXT_CHUNK` characters together."""
    for first in found:
        chunk, size = [first], len(first.text)
        while size < _TEXT_CHUNK and (more := next(found, None)) is not None:
            chunk.append(more)
            size += len(more.text)
        yield chunk


def stream_folder(config: DataConfig, names: Sequence[str], tokenizer: Tokenizer) -> Path:
    """Return the folder of a shard's stream, named after everything that decides its content."""
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
    """Return the folder of a shard's stream, and build it if it does not exist.

    Raises LrkvError as `tokenise` and `built` do.
    """
    features = token_features(CHUNK, tokenizer.vocabulary)
    splits = SPLITS if share_of(config) else SPLITS[:1]

    def write(scratch: Path) -> None:
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

    return built(stream_folder(config, names, tokenizer), config.directory, write)


class _Cut:
    """Writes a stream as rows of CHUNK tokens, at least one; the last row is filled up with BOS."""

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

    def close(self) -> int:
        rest = np.concatenate([*self._pending, np.empty(0, np.int32)])
        self._writer.write(np.pad(rest, (0, CHUNK - len(rest)), constant_values=self._bos))
        return self._writer.close()


class InMemory:
    """A stream that is an array. parts: none, for there is nothing on the disk."""

    parts: Sequence[tuple[Path, Split]] = ()

    def __init__(self, pieces: Sequence[np.ndarray]):
        self._tokens = np.concatenate([np.empty(0, np.int32), *pieces])

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens of places `start` to `stop` − 1."""
        return self._tokens[start:stop]


class OnDisk:
    """Some shards' streams, joined. parts: (folder, split) of each, in order."""

    def __init__(self, parts: Sequence[tuple[Path, Split]]):
        self.parts = parts
        self._rows = [TokenRows(folder, split) for folder, split in parts]
        lengths = [
            sum(file[split]["tokens"] for file in rows.metadata["files"])
            for rows, (_, split) in zip(self._rows, parts, strict=True)
        ]
        self._starts = [0, *itertools.accumulate(lengths)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens of places `start` to `stop` − 1."""
        found = [np.empty(0, np.int32)]
        while start < stop:
            shard = bisect_right(self._starts, start) - 1
            row, place = divmod(start - self._starts[shard], CHUNK)
            here = min(stop, self._starts[shard + 1]) - start
            piece = self._rows[shard][row][place : place + here]
            found.append(piece)
            start += len(piece)
        return np.concatenate(found)


Stream = InMemory | OnDisk


class Piece(NamedTuple):
    """Records `first` to `last` − 1 of a split, the content of one file."""

    first: int
    last: int


def pieces(tokens: int, context: int, *, padded: bool, vocabulary: int) -> list[Piece]:
    """Divide the records of a stream of this many tokens into files of similar size."""
    targets = max(tokens - 1, 0)
    total = -(-targets // context) if padded else targets // context
    bytes_each = (context + 1) * (2 if vocabulary <= 1 << 16 else 4)
    files = -(-total * bytes_each // FILE_BYTES)
    bounds = [total * n // files for n in range(files + 1)] if files else [0]
    return list(map(Piece, bounds, bounds[1:]))


def pack(blocks: Iterator[np.ndarray], context: int, padding: int | None) -> Iterator[np.ndarray]:
    """Cut a token stream into records [context + 1] that overlap by one token.

    blocks: the stream, int [any length] each. padding: the id that fills the last partial record;
    None drops that record. Of n tokens, records keep n − 1 targets (padded) or a multiple of
    context of them (dropped).
    """
    pending = np.empty(0, np.int32)
    for block in blocks:
        pending = np.concatenate([pending, block])
        whole = max(len(pending) - 1, 0) // context
        for start in range(0, whole * context, context):
            yield pending[start : start + context + 1]
        pending = pending[whole * context :]
    if padding is not None and len(pending) > 1:
        yield np.pad(pending, (0, context + 1 - len(pending)), constant_values=padding)


def write_piece(
    path: Path, stream: Stream, piece: Piece, context: int, padding: int | None, vocabulary: int
) -> None:
    """One file of records; raises OSError where it cannot be written.

    It takes its name when it is whole: a cluster may do the same piece twice at once.
    """
    start, stop = piece.first * context, min(piece.last * context + 1, len(stream))
    blocks = (stream.read(a, min(a + _BLOCK, stop)) for a in range(start, stop, _BLOCK))
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        features = token_features(context + 1, vocabulary)
        write_file(fresh, features, pack(blocks, context, padding))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
