"""What a file system owes whoever relies on a name that was just given."""

from __future__ import annotations

import os
from pathlib import Path


def flush(directory: Path) -> None:
    """Have a directory's entries on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
