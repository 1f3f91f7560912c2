"""A run's history: its starts, and the settings that changed between them."""

import json
from pathlib import Path
from typing import Any

from lrkv_jax.errors import LrkvError


def read_history(directory: str | Path) -> list[dict[str, Any]]:
    """The starts of a run and the changes of its settings, in order.

    Raises `LrkvError` for a row that is none.
    """
    path = Path(directory) / "history.jsonl"
    if not path.is_file():
        return []
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise LrkvError(f"{path} is not JSON objects in lines: delete what is not") from error
    return rows


def asked_dtype(directory: str | Path, dtype: str) -> str:
    """`model.dtype` as last requested for the run: auto, or `dtype`, its configuration's."""
    starts = [row for row in read_history(directory) if row.get("event") == "start"]
    return starts[-1].get("asked_dtype", dtype) if starts else dtype


def asked_dtypes(directory: str | Path, model: str, muon: str) -> tuple[str, str]:
    """`model.dtype` and `optimizer.muon.dtype` as requested, from what a start made of them.

    Of auto both are the same, so another one of Muon's was asked for.
    """
    asked = asked_dtype(directory, model)
    return asked, asked if muon == model else muon
