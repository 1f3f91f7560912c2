"""One process of a build, `python -m lrkv_jax.data.records.worker`: jobs in, news out, JSON lines.

A process of its own, not a fork of one that may hold JAX, and not multiprocessing's, which would
import the caller's main module. It ends when its input does, or when nobody reads its news, so it
does not outlive a parent that was killed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.packing import Piece, write_piece
from lrkv_jax.data.records.store import unwritable
from lrkv_jax.data.records.streams import OnDisk, build_stream
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError

_NEWS_SECONDS = 0.2


def main() -> None:
    """Do the jobs on standard input until it ends."""
    # Whatever a library prints must not be taken for news.
    news = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**what: Any) -> None:
        try:
            print(json.dumps(what), file=news, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone

    for line in sys.stdin:
        job = json.loads(line)
        config = DataConfig.model_validate(job["config"])
        try:
            tell(done={"tokenise": _tokenise, "pack": _pack}[job["kind"]](config, job, tell))
        except LrkvError as error:
            tell(error=str(error))
        except OSError as error:
            tell(error=str(unwritable(config.directory, error)))


def _tokenise(config: DataConfig, job: dict[str, Any], tell: Any) -> str:
    last = 0.0
    totals = {"documents": 0, "tokens": 0, "place": 0}

    def report(so_far: dict[str, int]) -> None:
        nonlocal last, totals
        totals = so_far
        if time.monotonic() - last > _NEWS_SECONDS:
            last = time.monotonic()
            tell(progress=totals)

    tell(progress=totals)
    tokenizer = load_tokenizer(config.tokenizer)
    folder = build_stream(config, job["names"], tokenizer, report)
    tell(progress=totals)
    return str(folder)


def _pack(config: DataConfig, job: dict[str, Any], tell: Any) -> list[int]:
    stream = _joined(json.dumps(job["parts"]))
    path, piece = Path(job["path"]), Piece(*job["piece"])
    written = write_piece(path, stream, piece, job["context"], job["padding"], job["vocabulary"])
    return list(written)


@functools.lru_cache(maxsize=2)
def _joined(parts: str) -> OnDisk:
    """Opened once for the many files that are cut from it."""
    return OnDisk([(Path(folder), split) for folder, split in json.loads(parts)])


if __name__ == "__main__":
    main()
