"""What a file system owes whoever relies on a name that was just given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Replace a file by this content, whole or not at all."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    fresh.replace(path)


def flush(directory: Path) -> None:
    """Have a directory's entries on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
