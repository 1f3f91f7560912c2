"""What a checkpoint says about itself, in `manifest.json` beside what Orbax wrote.

It names the step, the run and every array, and seals the files: their sizes and checksums as they
stood when the save had finished. It is written last, so a step without it is not one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# A large file's checksum is one of each piece, so that several threads share it.
PIECE_BYTES = 32 << 20
_READ_BYTES = 4 << 20


class Damaged(Exception):
    """A checkpoint that must not be used; the message says why, in one line."""


@cache
def versions() -> dict[str, str]:
    return {package: version(package) for package in PACKAGES}


def seal(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and checksums of every file in a directory, by relative path."""
    sizes = dict(sorted(_sizes(directory)))
    paths = list(sizes)
    pieces = [(path, start) for path in paths for start in range(0, sizes[path], PIECE_BYTES)]
    sums: dict[str, list[str]] = {path: [] for path in paths}
    for (path, _), checksum in zip(pieces, _checksums(directory, pieces, sizes), strict=True):
        sums[path].append(checksum)
    return {path: {"bytes": sizes[path], "crc32": sums[path]} for path in paths}


def _sizes(directory: Path) -> Iterator[tuple[str, int]]:
    """Relative path and size of every file."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            yield os.path.relpath(path, directory), os.stat(path).st_size


def write(directory: Path, content: dict[str, Any]) -> None:
    """Write the manifest and have it on the disk when this returns."""
    text = json.dumps({"format": FORMAT, **content})
    with (directory / NAME).open("w") as file:
        file.write("\n".join(_as_written(text)))
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[str, Any]:
    """The manifest of a step's directory. Raises `Damaged` where it is not what was written."""
    try:
        data = (directory / NAME).read_text(encoding="utf-8")
        head, _, text = data.partition("\n")
        content = json.loads(data)["manifest"]
        if content["format"] != FORMAT:
            raise Damaged(f"{NAME} is of format {content['format']}, not {FORMAT}")
        # To the letter: what JSON reads as the same is not what was written.
        if (head, text) != _as_written(json.dumps(content)):
            raise Damaged(f"{NAME} is not as it was written")
        if str(content["step"]) != directory.name:
            raise Damaged(f"it is the checkpoint of step {content['step']}")
    except (FileNotFoundError, NotADirectoryError):
        empty = directory.is_dir() and not any(directory.iterdir())
        raise Damaged("it is empty" if empty else f"it has no {NAME}") from None
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{NAME} is not as it was written") from None
    return content


def check_files(directory: Path, files: dict[str, dict[str, Any]], share: Iterable[str]) -> None:
    """Compare `share` of the sealed files with what is there. Raises `Damaged` for the first."""
    pieces, wanted, sizes = [], [], {}
    for path in share:
        sealed = files[path]
        try:
            size = (directory / path).stat().st_size
        except OSError as error:
            raise Damaged(f"{path} is missing ({error.strerror})") from None
        if size != sealed["bytes"]:
            raise Damaged(f"{path} has {size:,} bytes, not {sealed['bytes']:,}")
        sizes[path] = size
        pieces += [(path, start) for start in range(0, size, PIECE_BYTES)]
        wanted += sealed["crc32"]
    try:
        found = _checksums(directory, pieces, sizes)
        for (path, _), checksum, sealed in zip(pieces, found, wanted, strict=True):
            if checksum != sealed:
                raise Damaged(f"{path} is not as it was written")
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read ({error.strerror})") from None


def _checksums(directory: Path, pieces: list[tuple[str, int]], sizes: dict[str, int]) -> list[str]:
    """Checksums of pieces of files, in several threads where that is worth their start."""
    threads = min(8, os.cpu_count() or 1, len(pieces)) if sum(sizes.values()) > PIECE_BYTES else 1
    if threads == 1:
        return [_checksum(directory / path, start) for path, start in pieces]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda piece: _checksum(directory / piece[0], piece[1]), pieces))


def _checksum(path: Path, start: int) -> str:
    """CRC-32 of one piece of a file. `zlib` lets go of Python's lock, so threads help."""
    crc, left = 0, PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (block := file.read(min(left, _READ_BYTES))):
            crc = zlib.crc32(block, crc)
            left -= len(block)
    return f"{crc:08x}"


def _as_written(text: str) -> tuple[str, str]:
    """The manifest's two lines, as `write` makes them of a content's JSON."""
    return f'{{"crc32": "{zlib.crc32(text.encode()):08x}",', f'"manifest": {text}}}\n'
