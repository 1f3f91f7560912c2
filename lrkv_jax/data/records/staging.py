"""The first stage of a build: the source's text as streams of tokens, in memory or on the disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.pool import Run
from lrkv_jax.data.records.store import check_complete, open_dataset, remove_abandoned
from lrkv_jax.data.records.streams import (
    InMemory,
    OnDisk,
    Stream,
    share_of,
    stream_folder,
    tokenise,
)
from lrkv_jax.data.sources import EMBEDDED, SPLITS, Split, file_names, whole_files
from lrkv_jax.data.tokenizer import Tokenizer, usable_cores

# So much input takes seconds: it is not worth processes, nor streams on the disk.
_LITTLE_BYTES = 16 << 20
# Small files are tokenised together up to here; a larger one is a shard by itself.
_SHARD_BYTES = 8 << 20


class Done(NamedTuple):
    """How far a build is; bytes are those of the source's files, and `of_…` what is to be done."""

    documents: int
    tokens: int
    bytes: int
    of_bytes: int
    shards: int
    of_shards: int
    packed: int  # tokens in records, of those of the second stage
    resumed: int  # tokens that were there from an earlier build


Progress = Callable[[Done], None]


@dataclass
class Tally:
    """Adds up what the shards report, from whichever thread."""

    progress: Progress
    of_bytes: int
    shards: list[dict[str, int]]
    finished: set[int] = field(default_factory=set)
    packed: int = 0
    resumed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def shard(self, number: int, totals: dict[str, int] | None) -> None:
        with self.lock:
            if totals is None:
                self.finished.add(number)
            else:
                self.shards[number] = totals
            self.tell()

    def add_packed(self, tokens: int) -> None:
        with self.lock:
            self.packed += tokens
            self.tell()

    def tell(self) -> None:
        sums = (sum(s.get(key, 0) for s in self.shards) for key in ("documents", "tokens", "place"))
        of_shards = len(self.shards)
        self.progress(
            Done(*sums, self.of_bytes, len(self.finished), of_shards, self.packed, self.resumed)
        )


@dataclass(frozen=True)
class Tokenised:
    """The streams of both splits, an entry for each file, and what was tokenised together.

    parts: where the streams lie; empty for those in memory. shards: the files of each of them.
    """

    streams: dict[Split, Stream]
    files: list[dict[str, Any]]
    parts: dict[Split, list[tuple[str, Split]]] = field(default_factory=dict)
    shards: list[list[str]] = field(default_factory=list)

    def counts(self, split: Split) -> dict[str, int]:
        """The split's documents, tokens (BOS included) and UTF-8 bytes."""
        keys = ("documents", "tokens", "bytes")
        return {key: sum(file[split][key] for file in self.files) for key in keys}


def tokenise_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress,
    run: Run,
    *,
    always_staged: bool = False,
) -> tuple[Tokenised, Tally]:
    """All of the source as streams, and the tally to go on with.

    run: does the jobs, as `pool.run_jobs`. always_staged: even of little text.

    Raises LrkvError as `sources.rows` and `sources.whole_files` do.
    """
    names = file_names(config.source)
    whole = whole_files(config.source, names, config.heldout_shards)
    if config.source == EMBEDDED:
        sizes = {}
    else:
        sizes = {name: Path(config.source, name).stat().st_size for name in names}
    total = sum(sizes.values())
    staged = always_staged or config.workers is not None or total > _LITTLE_BYTES
    if sizes and staged:
        shards = _shards(sizes, whole)
        tally = Tally(progress, total, [{} for _ in shards])
        return _on_disk(config, shards, whole, tokenizer, tally, run), tally
    tally = Tally(progress, total, [{}])
    return _in_memory(config, names, whole, tokenizer, tally), tally


def clean_up(config: DataConfig, tokenised: Tokenised, tokenizer: Tokenizer) -> None:
    """Remove what killed builds left of the streams, and the streams if they are not to be kept."""
    for names in tokenised.shards:
        folder = stream_folder(config, names, tokenizer)
        remove_abandoned(folder)
        if not config.keep_streams:
            shutil.rmtree(folder, ignore_errors=True)


def _shards(sizes: dict[str, int], whole: dict[str, Split]) -> list[list[str]]:
    """The files, in order, those that follow one another and are small together."""
    shards: list[list[str]] = []
    size = 0
    for name, more in sizes.items():
        joins = shards and size + more <= _SHARD_BYTES
        if joins and whole.get(shards[-1][-1]) == whole.get(name):
            shards[-1].append(name)
            size += more
        else:
            shards.append([name])
            size = more
    return shards


def _in_memory(
    config: DataConfig,
    names: list[str],
    whole: dict[str, Split],
    tokenizer: Tokenizer,
    tally: Tally,
) -> Tokenised:
    found: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
    files = []
    waiting: list[tuple[Split, np.ndarray]] = []
    for piece in tokenise(config, names, tokenizer, lambda totals: tally.shard(0, totals)):
        if isinstance(piece, dict):
            for split, ids in waiting:
                found[whole.get(piece["name"], split)].append(ids)
            waiting.clear()
            files.append(_entry(piece, whole))
        else:
            waiting.append(piece)
    tally.shard(0, None)
    return Tokenised({split: InMemory(found[split]) for split in SPLITS}, files)


def _on_disk(
    config: DataConfig,
    shards: list[list[str]],
    whole: dict[str, Split],
    tokenizer: Tokenizer,
    tally: Tally,
    run: Run,
) -> Tokenised:
    folders = [stream_folder(config, names, tokenizer) for names in shards]
    missing = [number for number, folder in enumerate(folders) if not folder.exists()]
    for number in set(range(len(shards))) - set(missing):
        check_complete(folders[number])
        there = _files(folders[number])
        sums = {k: sum(f[s][k] for f in there for s in SPLITS) for k in ("documents", "tokens")}
        tally.resumed += sums["tokens"]
        tally.shards[number] = sums | {"place": sum(file["size"] for file in there)}
        tally.finished.add(number)
    tally.tell()
    asked = config.model_dump(mode="json")
    jobs = [{"kind": "tokenise", "config": asked, "names": shards[n]} for n in missing]
    run(
        jobs,
        config.workers or usable_cores(),
        lambda job, totals: tally.shard(missing[job], totals),
    )
    parts: dict[Split, list[tuple[str, Split]]] = {split: [] for split in SPLITS}
    files = []
    for names, folder in zip(shards, folders, strict=True):
        for split in SPLITS if share_of(config) else SPLITS[:1]:
            parts[whole.get(names[0], split)].append((str(folder), split))
        files += [_entry(file, whole) for file in _files(folder)]
    streams = {s: OnDisk([(Path(folder), split) for folder, split in parts[s]]) for s in SPLITS}
    return Tokenised(streams, files, parts, shards)


def _files(folder: Path) -> list[dict[str, Any]]:
    return open_dataset(folder).info.metadata["files"]


def _entry(file: dict[str, Any], whole: dict[str, Split]) -> dict[str, Any]:
    """A file's entry, counted under the split that it is held out in, or not, as a whole."""
    if whole.get(file["name"]) == "heldout":
        return file | {"train": file["heldout"], "heldout": file["train"]}
    return file
