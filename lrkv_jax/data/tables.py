"""Reading JSON-lines and parquet files: every fault is one line that names the file and the place.

`read_json_lines` and `read_parquet` are what documents (`lrkv_jax.data.sources`) are read with;
`rows` checks each row against a schema.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lrkv_jax.errors import LrkvError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
_MEND = "fetch the file again, or mend that row"
_BATCH = 1024


class Schema(BaseModel):
    """Base of a row's schema: the needed columns, strictly typed; other columns are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


def rows[S: Schema](path: Path, schema: type[S]) -> Iterator[tuple[str, S]]:
    """The rows of one .parquet, .jsonl or .jsonl.gz file, in order, each as (place, row).

    A place is "FILE:ROW", rows (lines, in JSON) counted from 1. Blank lines are skipped.

    Raises LrkvError that names the place and the column for what cannot be read or parsed, for a
    missing column and for one of another type.
    """
    if not path.name.endswith(SUFFIXES):
        raise LrkvError(f"{path} is none of {', '.join(SUFFIXES)}: convert it")
    if path.suffix == ".parquet":
        batches = read_parquet(path)
        found = ((done + n, row) for done, batch in batches for n, row in enumerate(batch, 1))
    else:
        found = ((number, row) for number, row, _ in read_json_lines(path, surrogates=False))
    return _checked(str(path), found, schema)


def rows_of[S: Schema](name: str, content: bytes, schema: type[S]) -> Iterator[tuple[str, S]]:
    """Like `rows`, for JSON lines that are in memory; `name` stands for the file."""
    found = _parsed(name, content.split(b"\n"), surrogates=False)
    return _checked(name, ((number, row) for number, row, _ in found), schema)


def _checked[S: Schema](
    name: str, found: Iterable[tuple[int, Any]], schema: type[S]
) -> Iterator[tuple[str, S]]:
    for number, row in found:
        if row is None:
            continue
        try:
            yield f"{name}:{number}", schema.model_validate(row)
        except ValidationError as error:
            raise LrkvError(f"{name}:{number}: {_first(error, row)}: {_MEND}") from None


def _first(error: ValidationError, row: dict[str, Any]) -> str:
    """Return pydantic's first complaint as `column …: what is expected, found …`."""
    detail = error.errors(include_url=False)[0]
    column = ".".join(str(step) for step in detail["loc"])
    if detail["type"] == "missing":
        return f"no column {column!r} (it has {', '.join(row) or 'none'})"
    found = detail["input"]
    shown = ascii(found) if len(ascii(found)) <= 40 else ascii(found)[:40] + "…"
    wants = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"column {column!r}: {wants}, found {shown} ({type(found).__name__})"


def read_json_lines(
    path: Path, *, surrogates: bool = True
) -> Iterator[tuple[int, dict[str, Any] | None, int]]:
    """Each line of a .jsonl or .jsonl.gz file: its number from 1, its object, its bytes.

    A blank line has None for its object. `surrogates`: whether text may hold half a surrogate
    pair, which no encoder takes. Raises LrkvError for a line that is not a JSON object.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, row, size in _parsed(str(path), file, surrogates=surrogates):  # noqa: B007
                yield number, row, size
    except (OSError, EOFError, zlib.error) as error:
        _check_permission(path, error)
        raise LrkvError(
            f"{path}: cannot be read after line {number} ({_reason(error)}): {_MEND}"
        ) from None


def _parsed(
    name: str, lines: Iterable[bytes], *, surrogates: bool
) -> Iterator[tuple[int, dict[str, Any] | None, int]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            yield number, None, len(line)
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if not surrogates and b"\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode()
        # RecursionError for brackets without end; ValueError also for a number of 4300 digits.
        except (ValueError, RecursionError) as error:
            raise LrkvError(f"{name}:{number}: not a JSON object ({error}): {_MEND}") from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise LrkvError(
                f"{name}:{number}: not a JSON object but a {kind}: use one {{…}} per line"
            )
        yield number, row, len(line)


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
    except UnicodeEncodeError:
        raise LrkvError(f"{path}: PyArrow opens no name that is not UTF-8: rename it") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        _check_permission(path, error)
        raise LrkvError(
            f"{path} is not readable parquet ({place}: {_reason(error)}): fetch the file again"
        ) from None


def _check_permission(path: Path, error: Exception) -> None:
    if isinstance(error, PermissionError):
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> LrkvError:
    """The error of a file or folder that the system does not let this user read."""
    return LrkvError(
        f"{path} cannot be read ({error.strerror or error}): change its permissions or remove it"
    )


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
