"""Rows of parquet and JSON-lines files against a schema, each with its place for errors."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lrkv_jax.errors import LrkvError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
_MEND = "fetch the file again, or mend that row"
_BATCH = 1024


class Schema(BaseModel):
    """Base of a set's row: the columns that are needed, strictly typed; others are let through."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


def rows[Row: Schema](path: Path, schema: type[Row]) -> Iterator[tuple[str, Row]]:
    """The rows of one .parquet, .jsonl or .jsonl.gz file, in order, each as (place, row).

    A place is "FILE:ROW", rows (lines, in JSON) counted from 1. Blank lines are passed over.

    Raises LrkvError that names the place and the column for what cannot be read or parsed, for a
    missing column and for one of another type.
    """
    if path.name.endswith(".parquet"):
        found = _parquet(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        found = _json_lines(str(path), _lines(path))
    else:
        raise LrkvError(f"{path} is none of {', '.join(SUFFIXES)}: convert it")
    return _checked(found, schema)


def rows_of[Row: Schema](name: str, content: bytes, schema: type[Row]) -> Iterator[tuple[str, Row]]:
    """As `rows`, of JSON lines that are in memory; `name` stands for the file."""
    return _checked(_json_lines(name, content.split(b"\n")), schema)


def _checked[Row: Schema](
    found: Iterable[tuple[str, Any]], schema: type[Row]
) -> Iterator[tuple[str, Row]]:
    for place, row in found:
        try:
            yield place, schema.model_validate(row)
        except ValidationError as error:
            raise LrkvError(f"{place}: {_first(error, row)}: {_MEND}") from None


def _first(error: ValidationError, row: dict[str, Any]) -> str:
    """The first of pydantic's complaints as `column …: what is wanted, found …`."""
    detail = error.errors(include_url=False)[0]
    column = ".".join(str(step) for step in detail["loc"])
    if detail["type"] == "missing":
        return f"no column {column!r} (it holds {', '.join(row) or 'none'})"
    found = detail["input"]
    shown = ascii(found) if len(ascii(found)) <= 40 else ascii(found)[:40] + "…"
    wants = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"column {column!r}: {wants}, found {shown} ({type(found).__name__})"


def _lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                yield line
    except (OSError, EOFError, zlib.error) as error:
        reason = str(error) or type(error).__name__
        raise LrkvError(f"{path}: cannot be read after line {number} ({reason}): {_MEND}") from None


def _json_lines(name: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if b"\\ud" in line.lower():  # half a surrogate pair would break whoever encodes it
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise LrkvError(f"{place}: not a JSON object ({error}): {_MEND}") from None
        if not isinstance(row, dict):
            raise LrkvError(f"{place}: a JSON {type(row).__name__}, not an object: {_MEND}")
        yield place, row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for number, row in enumerate(batch.to_pylist(), done + 1):
                    yield f"{path}:{number}", row
                done += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LrkvError(
            f"{path}: not readable parquet after row {done} ({reason}): fetch the file again"
        ) from None
