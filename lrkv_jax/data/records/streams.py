"""Text to streams of token ids, shard by shard; streams to records of context + 1 ids.

The stream of a shard (one file, or small ones together) depends on the text and the
tokenizer alone. Records of any context are cut from it, so the costly part is done
once, and a build that was killed continues with the shards that are missing. Where a
record begins in the stream is arithmetic, so any process may write any file of records.
"""

import hashlib
import json
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.folders import (
    appearing,
    token_dtype,
    token_features,
    write_file,
)
from lrkv_jax.data.sources import SPLITS, Document, Split, file_times, rows
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import write_json

FORMAT = 2  # raise it when the stream of the same input changes
ENTRIES = "files.json"
FILE_BYTES = 1 << 28  # of records in a file, about: TFDS advises 100 MB to some GB
_TEXT_CHUNK = 1 << 20  # characters: enough to keep the tokenizers' threads busy, little memory


def share_of(config: DataConfig) -> float:
    """The share of documents that are held out; 0 if whole files are."""
    return 0.0 if config.heldout_shards else config.heldout


def stream_folder(
    config: DataConfig, identities: Sequence[Sequence[Any]], tokenizer: Tokenizer
) -> Path:
    """Return the folder of a shard's stream, named after everything that decides its content.

    identities: its files' `file_identities`. Earlier versions had `file_times` instead, and a
    stream that one of them has made stays in use.
    """
    names = [name for name, *_ in identities]

    def folder(files: Sequence[Sequence[Any]]) -> Path:
        identity = [FORMAT, files, config.text_column, share_of(config), tokenizer.fingerprint]
        fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
        return Path(config.directory, "streams", f"{Path(names[0]).name[:60]}-{fingerprint}")

    earlier = folder(file_times(config.source, names))
    return earlier if earlier.is_dir() else folder(identities)


def write_stream(config: DataConfig, identities: Sequence[Sequence[Any]], target: Path) -> None:
    """Tokenize files, by `file_identities`, into `target`, which appears whole or not at all.

    `SPLIT.bin` holds a split's ids, with BOS before each document; `files.json` an entry for each
    file: name, size, sha256, rows, and documents, tokens (BOS included) and UTF-8 bytes in each
    split. Raises LrkvError as `sources.rows`, and OSError where the folder cannot be written.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    target.parent.mkdir(parents=True, exist_ok=True)
    with appearing(target) as folder:
        with ExitStack() as stack:
            files = {s: stack.enter_context((folder / f"{s}.bin").open("wb")) for s in SPLITS}
            entries = [_tokenize_file(config, file, tokenizer, files) for file in identities]
        write_json(folder / ENTRIES, {"files": entries})


def _tokenize_file(
    config: DataConfig,
    identity: Sequence[Any],
    tokenizer: Tokenizer,
    files: Mapping[Split, BinaryIO],
) -> dict[str, Any]:
    """Append one file's ids to its splits' files; returns its entry."""
    bos, dtype = np.array([tokenizer.bos], np.int32), token_dtype(tokenizer.vocabulary)
    name, size, sha256 = identity
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
            files[split].write(ids.astype(dtype).tobytes())
    return entry


def _chunks(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Lists of rows of about `_TEXT_CHUNK` characters together."""
    for first in found:
        chunk, size = [first], len(first.text)
        while size < _TEXT_CHUNK and (more := next(found, None)) is not None:
            chunk.append(more)
            size += len(more.text)
        yield chunk


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """The entries of the files that a stream was made of."""
    return json.loads((folder / ENTRIES).read_text())["files"]


class Stream:
    """Some shards' ids of a split, joined. parts: (folder, split in it) of each, in order.

    Raises LrkvError where a file's length is not the sum of its entries.
    """

    def __init__(self, parts: Sequence[tuple[Path, Split]], vocabulary: int):
        self._dtype, self._opened = np.dtype(token_dtype(vocabulary)), -1
        self._paths = [folder / f"{split}.bin" for folder, split in parts]
        self._starts = [0]
        for path, (folder, split) in zip(self._paths, parts, strict=True):
            tokens = sum(entry[split]["tokens"] for entry in entries_of(folder))
            if path.stat().st_size != tokens * self._dtype.itemsize:
                raise LrkvError(f"{folder} is damaged: delete it and it will be built again")
            self._starts.append(self._starts[-1] + tokens)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of places `start` to `stop` − 1."""
        found: list[np.ndarray] = []
        while start < stop:
            shard = bisect_right(self._starts, start) - 1
            if shard != self._opened:  # one at a time: there may be more than can be open
                self._opened, self._ids = shard, np.memmap(self._paths[shard], self._dtype, "r")
            place = start - self._starts[shard]
            found.append(self._ids[place : place + stop - start])
            start += len(found[-1])
        return np.concatenate(found)


def record_ranges(tokens: int, context: int, *, padded: bool, vocabulary: int) -> list[range]:
    """Divide the records of a stream of this many tokens into files of similar size."""
    targets = max(tokens - 1, 0)
    total = -(-targets // context) if padded else targets // context
    bytes_each = (context + 1) * np.dtype(token_dtype(vocabulary)).itemsize
    files = -(-total * bytes_each // FILE_BYTES)
    bounds = [total * n // files for n in range(files + 1)] if files else [0]
    return list(map(range, bounds, bounds[1:]))


def write_records(
    path: Path,
    parts: Sequence[tuple[Path, Split]],
    records: range,
    context: int,
    padding: int,
    vocabulary: int,
) -> None:
    """Write one file of records [context + 1], cut from the joined streams of `parts`.

    Each begins with the last id of the one before; `padding` fills the last one up.
    It takes its name when it is whole: a cluster may write the same file twice at once.
    Raises OSError where it cannot be written.
    """
    stream = Stream(parts, vocabulary)

    def record(number: int) -> np.ndarray:
        start = number * context
        ids = stream.read(start, min(start + context + 1, len(stream)))
        missing = context + 1 - len(ids)
        return np.pad(ids, (0, missing), constant_values=padding) if missing else ids

    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_file(fresh, token_features(context + 1, vocabulary), map(record, records))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
