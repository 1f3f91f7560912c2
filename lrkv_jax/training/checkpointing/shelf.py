"""The directories under `checkpoints/`: a step's number when it is whole, another name before that.

What has a number was renamed to it in one move after it was sealed. What is being written, or
deleted, has a name that no reader takes for a step, so a kill leaves a step or none.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from lrkv_jax.files import flush

ASIDE = "damaged"
_SAVING, _DELETING = ".saving-", ".deleting-"


def numbered(directory: Path) -> dict[int, Path]:
    """Directories that claim to be steps, by step, in order; what they hold is not looked at."""
    if not directory.is_dir():
        return {}
    # isdecimal and ascii: "²" is a digit, and "007" is not how a step is written.
    names = [p.name for p in directory.iterdir() if p.name.isascii() and p.name.isdecimal()]
    return {int(n): directory / n for n in sorted(names, key=int) if str(int(n)) == n}


def set_aside_there(directory: Path) -> list[Path]:
    """What was set aside before."""
    aside = directory / ASIDE
    return sorted(aside.iterdir()) if aside.is_dir() else []


def set_aside(step: Path) -> Path:
    """Move a step's directory away, where it is kept; returns where it went."""
    aside = step.parent / ASIDE
    aside.mkdir(exist_ok=True)
    taken = {path.name for path in aside.iterdir()}
    names = (step.name if n == 1 else f"{step.name}.{n}" for n in range(1, len(taken) + 2))
    target = aside / next(name for name in names if name not in taken)
    step.rename(target)
    return target


def saving(directory: Path, step: int) -> Path:
    """Where a step is written."""
    return directory / f"{_SAVING}{step}"


def publish(written: Path, step: int) -> None:
    """Give a written step its number, on the disk too when this returns."""
    flush(written)
    written.rename(written.parent / str(step))
    flush(written.parent)


def delete(step: Path) -> None:
    """Delete a step, if it is there; a kill half way leaves nothing that looks like one."""
    doomed = step.parent / f"{_DELETING}{step.name}"
    with contextlib.suppress(FileNotFoundError):  # somebody else is deleting it
        step.rename(doomed)
        shutil.rmtree(doomed)


def sweep(directory: Path) -> None:
    """Remove what killed or failed saves, and deletions, have left."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(path, ignore_errors=True)
