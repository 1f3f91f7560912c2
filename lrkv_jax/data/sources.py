"""Documents, in a fixed order, from the embedded corpus or from a folder; the held-out split."""

import contextlib
import hashlib
import json
import lzma
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lrkv_jax.data.assets import asset_checksum, read_asset
from lrkv_jax.data.tables import read_json_lines, read_parquet, unreadable
from lrkv_jax.data.tokenizer import Tokenizer, valid
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import read_json, write_json

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
SUFFIXES = (".txt", ".jsonl", ".parquet")  # of the files that are read

EMBEDDED = "sotu"
_CORPUS = "sotu.jsonl.xz"
# Whole years, so that the spoken and the written address of one year never straddle the splits.
_HELDOUT_YEARS = 6


def documents(
    source: str,
    split: Split,
    *,
    text_column: str = "text",
    heldout: float = 0.05,
    heldout_shards: int = 0,
) -> Iterator[str]:
    """Yield the documents of one split in a fixed order; empty ones are left out.

    source: "sotu", the embedded State of the Union addresses (the last six calendar years are
      held out), or a folder, searched recursively: a .txt file is a document, so is a
      .jsonl line and a .parquet row (their `text_column`).
    heldout: share of a folder's documents, 0 to 1. A document's split depends on its relative path
      and row alone, so it does not change when other files are added.
    heldout_shards: this many of a folder's last files are held out instead, if not 0.

    Raises LrkvError while iterating for a missing or empty folder, for what cannot be parsed, a
    missing column, and a split without a document.
    """
    found, names = False, file_names(source)
    whole = whole_files(source, names, heldout_shards)
    share = 0.0 if whole else heldout
    for name in names:
        if whole.get(name, split) != split:
            continue
        for row in rows(source, name, text_column=text_column, heldout=share):
            if row.text and (whole or row.split == split):
                found = True
                yield row.text
    if not found:
        raise no_document(source, split, heldout)


class Document(NamedTuple):
    """A row of a file: its split, and its text (empty where it has none)."""

    split: Split
    text: str


def rows(source: str, name: str, *, text_column: str, heldout: float) -> Iterator[Document]:
    """Yield every row of one of `file_names(source)`, in order, split by the share `heldout`.

    Raises LrkvError for a file that cannot be read or parsed and for a missing column.
    """
    if source == EMBEDDED:
        yield from _embedded()
        return
    path = Path(source, name)
    try:
        for number, text in enumerate(_texts(path, text_column)):
            out = heldout > 0 and _unit_hash(name, number) < heldout
            yield Document("heldout" if out else "train", text)
    except OSError as error:
        raise unreadable(path, error) from None


def file_names(source: str) -> list[str]:
    """Return the source's files in order, as paths relative to it.

    They are a folder's .txt, .jsonl and .parquet files. Raises LrkvError where there is no such
    folder or nothing in it.
    """
    if source == EMBEDDED:
        return [_CORPUS]
    wanted = ".txt, .jsonl or .parquet files"
    missing = LrkvError(
        f"data.source = {source} does not exist: make that folder and put {wanted} in it (for "
        "FineWeb-Edu the parquet files of HuggingFaceFW/fineweb-edu, sample/10BT), or use sotu"
    )
    try:
        if not stat.S_ISDIR(Path(source).stat().st_mode):
            raise LrkvError(f"data.source = {source} is a file: give the folder that holds it")
        names = [name for name in _files(source) if _suffix(name) in SUFFIXES]
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        raise missing from None
    except OSError as error:
        raise unreadable(Path(error.filename or source), error) from None
    if not names:
        raise LrkvError(f"data.source = {source} holds nothing to read: put {wanted} in it")
    return names


def left_out(source: str) -> list[str]:
    """The files of a folder that are not read, for their names."""
    if source == EMBEDDED or not Path(source).is_dir():  # as where its records are enough
        return []
    return [name for name in _files(source) if _suffix(name) not in SUFFIXES]


def whole_files(source: str, names: list[str], heldout_shards: int) -> dict[str, Split]:
    """The split of each file where files are held out whole; empty where documents are.

    Raises LrkvError where none would be left to train on.
    """
    if source == EMBEDDED or not heldout_shards:
        return {}
    if heldout_shards >= len(names):
        raise LrkvError(
            f"data.heldout_shards = {heldout_shards} holds out all that data.source = {source} "
            f"has ({len(names)} of them): add files, or use 0 and data.heldout"
        )
    training = len(names) - heldout_shards
    return {name: "train" if n < training else "heldout" for n, name in enumerate(names)}


def no_document(source: str, split: Split, heldout: float) -> LrkvError:
    """The error of a split without a document."""
    return LrkvError(
        f"data.source = {source} has no document in its {split} split: "
        f"change data.heldout = {heldout} or add documents"
    )


def _files(source: str) -> list[str]:
    """The files below a folder, without hidden ones, in which a download keeps its notes.

    Folders that are linked there are read too, and one that is linked in itself once.
    """
    found, seen = [], set()
    for folder, folders, names in os.walk(source, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path.relative_to(source).as_posix() for path in paths if path.is_file()]
    return sorted(found)


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _raise(error: OSError) -> None:
    raise error


def embedded_identity() -> list[Any]:
    """Return what records of the embedded corpus depend on, as JSON."""
    return [EMBEDDED, asset_checksum(_CORPUS), _HELDOUT_YEARS]


def file_times(source: str, names: Sequence[str]) -> list[list[Any]]:
    """The name, size and time of change of each file, or the asset's checksum.

    Raises LrkvError for a file that is not there any more.
    """
    if source == EMBEDDED:
        return [[name, asset_checksum(name)] for name in names]
    try:
        found = [(name, Path(source, name).stat()) for name in names]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from None
    return [[name, about.st_size, about.st_mtime_ns] for name, about in found]


def file_identities(source: str, names: Sequence[str], cache: Path) -> list[list[Any]]:
    """The name, size and sha256 of each file: the same for any copy.

    `cache` keeps the sums, so that a file is read again only when its size or time has changed.
    """
    if source == EMBEDDED:
        return [[name, len(read_asset(name)), asset_checksum(name)] for name in names]
    known = read_json(cache, "delete it") or {}
    identities, now = [], dict(known)
    for name, size, time in file_times(source, names):
        path = str(Path(source, name).absolute())
        if known.get(path, [])[:2] != [size, time]:
            now[path] = [size, time, _checksum(Path(source, name))]
        identities.append([name, size, now[path][2]])
    if now != known:
        with contextlib.suppress(OSError):  # a full disk: they are read again
            write_json(cache, now)
    return identities


def _checksum(path: Path) -> str:
    """A file's sha256 (hex)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from None


def _embedded() -> Iterator[Document]:
    lines = lzma.decompress(read_asset(_CORPUS)).splitlines()
    addresses = [json.loads(line) for line in lines]
    years = sorted({address["date"][:4] for address in addresses})
    first_heldout = years[-_HELDOUT_YEARS]
    for address in addresses:
        split: Split = "heldout" if address["date"][:4] >= first_heldout else "train"
        yield Document(split, address["text"])


def docstrings() -> list[str]:
    """A second held-out text: the docstrings of Python's standard library, one text a module.

    An order of variants on one text alone may be an order of how they fit that text.
    """
    lines = lzma.decompress(read_asset("stdlib.jsonl.xz")).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def docstring_rows(tokenizer: Tokenizer, context: int) -> np.ndarray:
    """`docstrings` as records: int32 [rows, context + 1], each from the last id of the one before.

    Each module's docstrings begin with BOS. The last row is filled up with complemented
    ids, which are no targets (`lrkv_jax.training.token_batch`).
    """
    ids = [i for one in tokenizer.encode_batch(docstrings()) for i in (tokenizer.bos, *one)]
    rows = -(-(len(ids) - 1) // context)
    padded = np.full(rows * context + 1, ~tokenizer.bos, np.int32)
    padded[: len(ids)] = ids
    return np.stack([padded[row * context : (row + 1) * context + 1] for row in range(rows)])


def _unit_hash(relative: str, row: int) -> float:
    """A number in [0, 1) that depends on neither Python's hash seed nor the machine."""
    # A name need not be UTF-8.
    name = f"{relative}\0{row}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(name, digest_size=8).digest()
    # 53 bits: a double holds no more, and rounding up to 1.0 must not happen.
    return (int.from_bytes(digest) >> 11) / 2**53


def _texts(path: Path, column: str) -> Iterator[str]:
    """The text of each row; raises LrkvError where a row has none under that name."""
    suffix = _suffix(path.name)
    if suffix == ".txt":
        try:
            yield path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise LrkvError(f"{path}: byte {error.start} is not UTF-8: convert the file") from None
        return
    found = read_json_lines(path) if suffix == ".jsonl" else read_parquet(path, column)
    for number, row in found:
        if column not in row:
            there = ", ".join(row) or "none"
            raise LrkvError(
                f"{path}:{number}: no column {column!r}: set data.text_column to one of: {there}"
            )
        text = row[column]
        if text is not None and not isinstance(text, str):
            kind = type(text).__name__
            raise LrkvError(
                f"{path}:{number}: column {column!r} is {kind}, not text: set data.text_column"
            )
        yield valid(text or "")
