"""A checkpoint on the disk: the names of its directory, and the checksum manifest in it.

`manifest.json`, next to Orbax's files, names the step, the run and every array, and has the sizes
and checksums of the files as they stood when the save had finished. It is written last, and the
directory gets the step's number in one move after that. What is being written, or deleted, has a
name that no reader takes for a step, so a kill leaves a step or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lrkv_jax.files import flush

MANIFEST = "manifest.json"
FORMAT = 1
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
DAMAGED = "damaged"  # where damaged steps are moved
_SAVING, _DELETING = ".saving-", ".deleting-"

# A file's checksum is a list, one of each piece of this size.
PIECE_BYTES = 32 << 20
_THREADS = 8


class Damaged(Exception):
    """A checkpoint that must not be used; the message gives the reason in one line."""


def numbered(directory: Path) -> dict[int, Path]:
    """Directories that claim to be steps, by step, in order; what they hold is not looked at."""
    if not directory.is_dir():
        return {}
    # isdecimal and ascii: "²" is a digit, and "007" is not how a step is written.
    names = [p.name for p in directory.iterdir() if p.name.isascii() and p.name.isdecimal()]
    return {int(n): directory / n for n in sorted(names, key=int) if str(int(n)) == n}


def saving(directory: Path, step: int) -> Path:
    """The directory into which a step is written."""
    return directory / f"{_SAVING}{step}"


def publish(folder: Path, step: int) -> None:
    """Give a written step its number, on the disk too when this returns."""
    flush(folder)
    folder.rename(folder.parent / str(step))
    flush(folder.parent)


def delete(step: Path) -> None:
    """Delete a step, if it is there; a kill half way leaves nothing that looks like one."""
    doomed = step.parent / f"{_DELETING}{step.name}"
    with contextlib.suppress(FileNotFoundError):  # another process is deleting it
        step.rename(doomed)
        shutil.rmtree(doomed)


def sweep(directory: Path) -> None:
    """Remove what killed or failed saves, and deletions, have left."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(step: Path) -> Path:
    """Move a damaged step to `damaged/`, where nothing deletes it; returns its new path."""
    directory = step.parent / DAMAGED
    directory.mkdir(exist_ok=True)
    before = sum(path.name.partition(".")[0] == step.name for path in directory.iterdir())
    target = directory / (f"{step.name}.{before + 1}" if before else step.name)
    step.rename(target)
    return target


@cache
def versions() -> dict[str, str]:
    """The versions of the libraries that a checkpoint was written with."""
    return {package: version(package) for package in PACKAGES}


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write the manifest and have it on the disk when this returns; replaces one in one move."""
    text, fresh = json.dumps({"format": FORMAT, **content}), directory / f".{MANIFEST}"
    with fresh.open("w") as file:
        file.write("\n".join(_lines(text)))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a step's directory. Raises `Damaged` where it is not what was written."""
    try:
        data = (directory / MANIFEST).read_text(encoding="utf-8")
        head, _, text = data.partition("\n")
        content = json.loads(data)["manifest"]
        if content["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} is of format {content['format']}, not {FORMAT}")
        # To the letter: what JSON reads as the same is not what was written.
        if (head, text) != _lines(json.dumps(content)):
            raise Damaged(f"{MANIFEST} is not as it was written")
        if str(content["step"]) != directory.name:
            raise Damaged(f"it is the checkpoint of step {content['step']}")
    except (FileNotFoundError, NotADirectoryError):
        empty = directory.is_dir() and not any(directory.iterdir())
        raise Damaged("it is empty" if empty else f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} is not as it was written") from None
    return content


def _lines(text: str) -> tuple[str, str]:
    """The manifest's two lines, as `write_manifest` makes them of a content's JSON."""
    return f'{{"crc32": "{zlib.crc32(text.encode()):08x}",', f'"manifest": {text}}}\n'


def checksums(directory: Path, files: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Size and checksums of files in a directory, of all unless named, by relative path."""
    if files is None:
        there = (path for path in directory.rglob("*") if path.is_file())
        files = sorted(str(path.relative_to(directory)) for path in there)
    names = list(files)
    with ThreadPoolExecutor(_THREADS) as pool:  # `zlib` lets go of Python's lock
        found = pool.map(lambda name: _checksum(directory / name), names)
        return dict(zip(names, found, strict=True))


def _checksum(path: Path) -> dict[str, Any]:
    size, pieces = 0, []
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            size += len(piece)
            pieces.append(f"{zlib.crc32(piece):08x}")
    return {"bytes": size, "crc32": pieces}


def check_files(directory: Path, files: dict[str, dict[str, Any]], share: Iterable[str]) -> None:
    """Compare `share` of a manifest's files with the disk. Raises `Damaged` for the first."""
    share = list(share)
    try:
        for name in share:  # before minutes of reading
            size = (directory / name).stat().st_size
            if size != files[name]["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes, not {files[name]['bytes']:,}")
        found = checksums(directory, share)
    except OSError as error:
        name = Path(error.filename or directory).name
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        problem = "is missing" if missing else "cannot be read"
        raise Damaged(f"{name} {problem} ({error.strerror})") from None
    for name in share:
        if found[name] != files[name]:
            raise Damaged(f"{name} is not as it was written")
