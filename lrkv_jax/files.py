"""Files that are written whole or not at all, and names that are on the disk on return."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lrkv_jax.errors import LrkvError

# What a full disk has no room for.
_PROBE_BYTES = 4096


def write(path: str | Path, text: str) -> None:
    """Replace a file by this text in one move, as UTF-8 whatever the locale.

    A link stays a link, and the file that it names is replaced; a device or a pipe is written
    through. Text that UTF-8 has no bytes for (a lone surrogate) is escaped as in JSON. Raises
    `OSError`, and leaves what was there, where the file cannot be written.
    """
    real, data = Path(os.path.realpath(path)), text.encode("utf-8", "backslashreplace")
    if _is_special(real):
        real.write_bytes(data)
        return
    fresh = _beside(real)
    try:
        with fresh.open("xb") as file:
            file.write(data)
            if real.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(real.stat().st_mode))
        fresh.replace(real)
    except OSError as error:
        with suppress(OSError):  # its folder may be none
            fresh.unlink()
        # Not the name of the temporary file, which nobody knows.
        raise OSError(error.errno, error.strerror, str(path)) from error


def finite(content: Any) -> Any:
    """The content with null for the numbers that JSON lacks; not every reader takes NaN."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def json_of(content: Any) -> str:
    """What a command prints and a file holds as JSON, as `finite` has it."""
    return json.dumps(finite(content), indent=2, default=_plain)


def _plain(value: Any) -> Any:
    """A number of NumPy or JAX as Python's, and a path as its text."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def write_json(path: str | Path, content: Any) -> None:
    """Write `content` as `json_of` has it, as `write` does."""
    write(path, json_of(content) + "\n")


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A fresh folder to write into, which becomes `path` in one move when the block ends.

    Nothing is left where it raises. Raises `LrkvError` where `path` holds something or cannot be
    made.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise LrkvError(f"{path} exists: name another, or delete it")
    fresh = _beside(path.absolute())
    try:
        fresh.mkdir(parents=True)
    except OSError as error:
        raise LrkvError(f"{path} cannot be made ({error.strerror}): name another") from error
    try:
        yield fresh
        flush(fresh)
        fresh.replace(path)
        flush(fresh.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_writable(path: str | Path) -> None:
    """Raise `LrkvError` where `write` would fail: before the work whose result is to be written.

    A file system that is full is noticed, and nothing is left behind.
    """
    try:
        real = Path(os.path.realpath(path))
        if real.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_special(real):
            if not os.access(real, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        fresh = _beside(real)
        try:
            fresh.write_bytes(bytes(_PROBE_BYTES))
        finally:
            fresh.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LrkvError(f"{path} cannot be written ({reason}): name another") from error


def read_json(path: Path, hint: str) -> dict[str, Any] | None:
    """The mapping in a JSON file, None if there is no file.

    Raises `LrkvError`, which ends in `hint`, for a file that holds none.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LrkvError(f"{path} cannot be read as JSON: {hint}") from error
    if not isinstance(content, dict):
        raise LrkvError(f"{path} is not a JSON mapping: {hint}")
    return content


def flush(directory: Path) -> None:
    """Have a directory's entries on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_special(path: Path) -> bool:
    """Whether `path` exists and is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _beside(path: Path) -> Path:
    """A name in the same folder that no other process takes."""
    start = os.fsencode(path.name)[:100].decode(errors="ignore")  # a name's limit is in bytes
    return path.with_name(f".{start}.{secrets.token_hex(4)}.part")
