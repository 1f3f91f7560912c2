"""A run's checkpoints from outside: which there are, and whether each is sound.

Works on a run in progress too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import layout
from lrkv_jax.training.checkpointing.checkpointer import best_of
from lrkv_jax.training.checkpointing.layout import Damaged


@dataclass(frozen=True)
class Entry:
    """One directory that claims to be a checkpoint: its step, manifest, and what is wrong."""

    path: Path
    step: int
    manifest: dict[str, Any] | None
    damage: str | None = None
    best: bool = False

    @property
    def bytes(self) -> int:
        """The present size of the checkpoint's files."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())


def entries(run: str | Path) -> list[Entry]:
    """Every step, in order, by its manifest alone; damage that shows there is named.

    Raises `LrkvError` where there is no directory of checkpoints.
    """
    directory = Path(run).absolute() / "checkpoints"
    if not directory.is_dir():
        raise LrkvError(f"{run} has no checkpoints: give a run's directory")
    there = layout.numbered(directory)
    best = best_of(directory, list(there))
    found = (_entry(path, step, step == best) for step, path in there.items())
    return [entry for entry in found if entry is not None]


def _entry(path: Path, step: int, best: bool) -> Entry | None:
    """None for a step that was deleted since it was listed: a run may be training."""
    try:
        return Entry(path, step, layout.read_manifest(path), best=best)
    except Damaged as damage:
        return Entry(path, step, None, str(damage)) if path.exists() else None


def verify(entry: Entry) -> Entry | None:
    """The entry with what is wrong with its files, all of which are read.

    None if it was deleted meanwhile, by a run that is training.
    """
    if entry.damage is not None:
        return entry
    try:
        files = entry.manifest["files"]
        layout.check_files(entry.path, files, files)
    except Damaged as damage:
        if not entry.path.exists():
            return None
        return Entry(entry.path, entry.step, entry.manifest, str(damage), entry.best)
    return entry
