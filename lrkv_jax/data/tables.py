"""Reading JSON-lines and parquet: every fault is one line that names the file and the place."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lrkv_jax.errors import LrkvError

_FIX = "fetch the file again, or correct that row"
_BATCH = 1024


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line of a .jsonl file that is not blank: its number from 1, and its object.

    Raises LrkvError for a line that is not a JSON object and for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(f"{path}:{number}", line)
    except OSError as error:
        raise unreadable(path, error) from None


def _parsed(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    # RecursionError for brackets without end; ValueError also for a number of 4300 digits.
    except (ValueError, RecursionError) as error:
        raise LrkvError(f"{place}: not a JSON object ({error}): {_FIX}") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise LrkvError(f"{place}: not a JSON object but a {kind}: use one {{…}} per line")
    return row


def read_parquet(path: Path, column: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a parquet file: its number from 1, and its values by column.

    column: the one to read; all unless given, or where the file does not have it.
    Raises LrkvError for a damaged file, with its row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    place, done = "its footer", 0
    try:
        if not path.is_file():  # PyArrow reads a folder as a data set
            raise LrkvError(f"{path} is not a file: remove it")
        # Checksums of pages are compared where the writer left them.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            columns = [column] if column in file.schema_arrow.names else None
            for group in range(file.num_row_groups):
                place = f"row group {group} of {file.num_row_groups}, after row {done}"
                # One small batch at a time: a FineWeb-Edu file is 2 GB of text. In this
                # thread: several files are read at once, each by a separate process.
                for batch in file.iter_batches(
                    batch_size=_BATCH, row_groups=[group], columns=columns, use_threads=False
                ):
                    yield from enumerate(batch.to_pylist(), done + 1)
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
