"""Which run a midtrained run had its text from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lrkv_jax.comparison.runs import RunRecord, read_runs
from lrkv_jax.errors import LrkvError


def pretraining(run: RunRecord, known: Mapping[Path, RunRecord]) -> RunRecord:
    """The run whose loss is of text: this one, or what it was started from.

    `known` are runs by their resolved path; others are read from `init_from`. Raises `LrkvError`
    where there is none, or it has not finished: it has no bits per byte then.
    """
    before = run
    while before.midtrained:
        if not before.config.init_from:
            raise LrkvError(f"no pretraining: {before.path} began with conversations")
        path = Path(before.config.init_from)
        if path.resolve() not in known and not (path / "config.yaml").is_file():
            raise LrkvError(f"no run: {path}, which {before.path} was started from")
        before = known.get(path.resolve()) or read_runs([path])[0]
    if before.bits_per_byte is None:
        raise LrkvError(f"not finished: {before.path}, so no bits per byte of {run.label}")
    return before
