"""Reading JSON-lines and parquet files: every fault is one line that names the file and the place.

`read_json_lines` and `read_parquet` are what documents (`lrkv_jax.data.sources`) are read with;
`parquet_rows` checks each row against a schema.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lrkv_jax.errors import LrkvError

_FIX = "fetch the file again, or correct that row"
_BATCH = 1024


class Schema(BaseModel):
    """Base of a row's schema: the needed columns, strictly typed; other columns are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


def parquet_rows[S: Schema](path: Path, schema: type[S]) -> Iterator[tuple[str, S]]:
    """The rows of a parquet file, in order, each as (place, row).

    A place is "FILE:ROW", counted from 1. Raises LrkvError that names the place and the column for
    what cannot be read, for a missing column and for one of another type.
    """
    numbered = (
        (done + n, row) for done, batch in read_parquet(path) for n, row in enumerate(batch, 1)
    )
    return _checked(str(path), numbered, schema)


def json_rows[S: Schema](name: str, content: bytes, schema: type[S]) -> Iterator[tuple[str, S]]:
    """Like `parquet_rows`, for JSON lines in memory; `name` stands for the file."""
    return _checked(name, _parsed(name, content.split(b"\n")), schema)


def _checked[S: Schema](
    name: str, found: Iterable[tuple[int, Any]], schema: type[S]
) -> Iterator[tuple[str, S]]:
    for number, row in found:
        try:
            yield f"{name}:{number}", schema.model_validate(row)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            column = ".".join(map(str, detail["loc"]))
            raise LrkvError(
                f"{name}:{number}: column {column!r}: {detail['msg']}: {_FIX}"
            ) from None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line of a .jsonl file that is not blank: its number from 1, and its object.

    Raises LrkvError for a line that is not a JSON object and for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from _parsed(str(path), file)
    except OSError as error:
        raise unreadable(path, error) from None


def _parsed(name: str, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        # RecursionError for brackets without end; ValueError also for a number of 4300 digits.
        except (ValueError, RecursionError) as error:
            raise LrkvError(f"{name}:{number}: not a JSON object ({error}): {_FIX}") from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise LrkvError(
                f"{name}:{number}: not a JSON object but a {kind}: use one {{…}} per line"
            )
        yield number, row


def read_parquet(
    path: Path,
    columns: Sequence[str] | None = None,
    check: Callable[[Any], None] = lambda file: None,
) -> Iterator[tuple[int, list[Any]]]:
    """A parquet file in small batches: (rows before the batch, its rows).

    columns: all unless given; of a single one the values themselves. check: called with the
    opened file. Raises LrkvError for a damaged file, with its row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    place, done = "its footer", 0
    try:
        if not path.is_file():  # PyArrow reads a folder as a data set
            raise LrkvError(f"{path} is not a file: remove it")
        # Checksums of pages are compared where the writer left them.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check(file)
            for group in range(file.num_row_groups):
                place = f"row group {group} of {file.num_row_groups}, after row {done}"
                # One small batch at a time: a FineWeb-Edu file is 2 GB of text. In this thread:
                # several files are read at once, each by a process of its own.
                for batch in file.iter_batches(
                    batch_size=_BATCH, row_groups=[group], columns=columns, use_threads=False
                ):
                    found = batch.column(0) if columns and len(columns) == 1 else batch
                    yield done, found.to_pylist()
                    done += batch.num_rows
                    place = f"row group {group} of {file.num_row_groups}, after row {done}"
    except PermissionError as error:
        raise unreadable(path, error) from None
    except UnicodeEncodeError:
        raise LrkvError(f"{path}: PyArrow opens no name that is not UTF-8: rename it") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LrkvError(
            f"{path} is not readable parquet ({place}: {reason}): fetch the file again"
        ) from None


def unreadable(path: Path, error: OSError) -> LrkvError:
    """The error of a file or folder that the system does not let this user read."""
    return LrkvError(
        f"{path} cannot be read ({error.strerror or error}): change its permissions or remove it"
    )
