"""Documents to records on disk: fixed windows of tokens in a TFDS dataset of ArrayRecord files.

Records are packed offline so that the loader is index arithmetic. A record holds context + 1
tokens and shares its last one with the next record's first, so each token of a split is a target
exactly once (the first, a BOS, has no predecessor), across the source's files as within them.

One road: the source's files are grouped to shards, each shard becomes a stream of tokens, the
streams of a split are joined, records are cut from them, and a manifest is written beside. A little
text is done here, with the streams in memory. More is done by several processes, with the streams
on the disk (`lrkv_jax.data.records.streams`), so that a killed build continues where it was.
"""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lrkv_jax import __version__
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.hub import provenance_of
from lrkv_jax.data.records.folders import (
    built,
    describe,
    file_name,
    open_dataset,
    remove_abandoned,
    token_features,
)
from lrkv_jax.data.records.jobs import RunJobs, run_jobs
from lrkv_jax.data.records.streams import (
    InMemory,
    OnDisk,
    Piece,
    Stream,
    pieces,
    share_of,
    stream_folder,
    tokenise,
    write_piece,
)
from lrkv_jax.data.sources import (
    EMBEDDED,
    SPLITS,
    Split,
    file_names,
    no_document,
    source_identity,
    whole_files,
)
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.distributed.device import usable_cores
from lrkv_jax.errors import LrkvError

FORMAT = 2  # raise it when records of the same input change
_PACKAGES = ("numpy", "pyarrow", "tensorflow-datasets", "tiktoken", "tokenizers")

# This much input takes seconds: it is not worth processes, nor streams on the disk.
_LITTLE_BYTES = 16 << 20
# Small files are tokenised together up to here; a larger one is a shard by itself.
SHARD_BYTES = 8 << 20


OnProgress = Callable[[str, float, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Shard:
    """Files that are tokenised together. whole: the split that they are in as whole files."""

    names: list[str]
    size: int
    whole: Split | None

    def entry(self, file: dict[str, Any]) -> dict[str, Any]:
        """A file's entry, counted under the split that the file is in."""
        if self.whole == "heldout":
            return file | {"train": file["heldout"], "heldout": file["train"]}
        return file


@dataclass(frozen=True)
class Packing:
    """How a dataset's records are cut from its streams. pieces: the files of each split."""

    context: int
    vocabulary: int
    bos: int
    pieces: dict[Split, list[Piece]]
    metadata: dict[str, Any]

    def padding(self, split: Split) -> int | None:
        """The id that fills a split's last record; None drops that record."""
        return self.bos if split == "heldout" else None


Streams = dict[Split, Stream]


def _write_records(
    folder: Path,
    config: DataConfig,
    streams: Streams,
    packing: Packing,
    packed: Callable[[int], None],
    run: RunJobs | None,
) -> None:
    """Write the dataset into the folder, its files by several processes where there are several.

    packed: called with the tokens of each file that is written. Raises OSError and LrkvError where
    the folder cannot be written.
    """
    places = [
        (split, piece, folder / file_name(split, number, len(packing.pieces[split])))
        for split in SPLITS
        for number, piece in enumerate(packing.pieces[split])
    ]

    def done(number: int, totals: dict[str, int] | None = None) -> None:
        if totals is None:
            piece = places[number][1]
            packed((piece.last - piece.first) * packing.context)

    # One file per split is written sooner than a process starts.
    if streams["train"].parts and (run or len(places) > len(SPLITS)):
        jobs = [
            {
                "kind": "pack", "config": config.model_dump(mode="json"), "piece": piece,
                "parts": [(str(part), which) for part, which in streams[split].parts],
                "path": str(path), "context": packing.context, "padding": packing.padding(split),
                "vocabulary": packing.vocabulary,
            }
            for split, piece, path in places
        ]  # fmt: skip
        (run or run_jobs)(jobs, config.workers or usable_cores(), done)
        for _, _, path in places:
            # Of a worker that was killed, where another has written the same file.
            for left in folder.glob(f".{path.name}.*"):
                left.unlink(missing_ok=True)
    else:
        for number, (split, piece, path) in enumerate(places):
            cut = packing.context, packing.padding(split), packing.vocabulary
            write_piece(path, streams[split], piece, *cut)
            done(number)
    rows = {split: [last - first for first, last in packing.pieces[split]] for split in SPLITS}
    features = token_features(packing.context + 1, packing.vocabulary)
    described = "Records of context + 1 tokens for language modelling."
    describe(folder, features, rows, description=described, metadata=packing.metadata)


def build_dataset(
    data_config: DataConfig,
    context: int,
    *,
    progress: OnProgress | None = None,
    run: RunJobs | None = None,
) -> Path:
    """Return the folder of the records of this data and context, built if it does not exist.

    It is data_config.directory / (a readable key and a fingerprint of all that decides the
    records). It appears whole or not at all, so a killed build is never taken for a complete one
    and processes that build the same dataset at once do not disturb each other. After a kill the
    same command continues with the shards that are missing, to the same bits.

    Splits: train (the last partial record is dropped) and heldout (it is padded with BOS, which
    stand for no bytes and so count nowhere). Their metadata has format, source, provenance,
    tokenizer, tokenizer_fingerprint, vocabulary, context, versions, `files`, and under each split's
    name its documents, tokens (BOS included) and UTF-8 bytes.

    progress: called now and then, from any thread. run: does the work, even of a little text
    (`lrkv_jax.data.records.beam`); unless given, processes of this machine do what is much.
    Raises LrkvError for whatever `documents` and `load_tokenizer` raise it for, for a context that
    the text cannot fill, and for a folder that cannot be written or is damaged.
    """
    tokenizer = load_tokenizer(data_config.tokenizer)
    provenance_of(data_config)  # before files are looked for that are still to be fetched
    target = Path(data_config.directory) / _key(data_config, context, tokenizer)
    folders: list[Path] = []

    def write(scratch: Path) -> None:
        report = progress or (lambda what, done, total: None)
        folders.extend(_write(scratch, data_config, context, tokenizer, report, run))

    built(target, data_config.directory, write)
    for folder in folders:
        remove_abandoned(folder)
        if not data_config.keep_streams:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def _write(
    scratch: Path,
    config: DataConfig,
    context: int,
    tokenizer: Tokenizer,
    progress: OnProgress,
    run: RunJobs | None,
) -> Sequence[Path]:
    """Go the whole road; returns the folders of the streams if they are on the disk."""
    if run and config.source == EMBEDDED:
        raise LrkvError("--beam builds a folder of files: set data.source to one")
    shards = _shards(config)
    report = _Report(progress, shards)
    much = config.workers is not None or sum(shard.size for shard in shards) > _LITTLE_BYTES
    folders = []
    if config.source != EMBEDDED and (run or much):
        folders = [stream_folder(config, shard.names, tokenizer) for shard in shards]
        streams, files = _on_disk(config, shards, folders, report, run or run_jobs)
    else:
        streams, files = _in_memory(config, shards, tokenizer, report)
    packing = _packing(config, context, tokenizer, files)
    _write_records(scratch, config, streams, packing, report.packed, run)
    return folders


def _shards(config: DataConfig) -> list[Shard]:
    """Group the source's files, in order: small neighbours of one split are tokenised together."""
    names = file_names(config.source)
    whole = whole_files(config.source, names, config.heldout_shards)
    shards: list[Shard] = []
    for name in names:
        size = 0 if config.source == EMBEDDED else Path(config.source, name).stat().st_size
        last = shards[-1] if shards else None
        if last and last.size + size <= SHARD_BYTES and last.whole == whole.get(name):
            shards[-1] = Shard([*last.names, name], last.size + size, last.whole)
        else:
            shards.append(Shard([name], size, whole.get(name)))
    return shards


class _Report:
    """Adds up what the shards report; called from any thread."""

    def __init__(self, progress: OnProgress, shards: Sequence[Shard]):
        self._progress, self._lock = progress, threading.Lock()
        self._bytes = sum(shard.size for shard in shards)
        self._totals: list[dict[str, int]] = [{} for _ in shards]
        self._packed = 0

    def shard(self, number: int, totals: dict[str, int] | None) -> None:
        """Note a shard's tokens and its place in the bytes of its files; None says it is done."""
        with self._lock:
            self._totals[number] = totals or self._totals[number]
            self._progress("bytes read", self._total("place"), self._bytes)

    def packed(self, tokens: int) -> None:
        """Note that more tokens are in records."""
        with self._lock:
            self._packed += tokens
            self._progress("tokens packed", self._packed, self._total("tokens"))

    def _total(self, key: str) -> int:
        return sum(totals.get(key, 0) for totals in self._totals)


def _in_memory(
    config: DataConfig, shards: Sequence[Shard], tokenizer: Tokenizer, report: _Report
) -> tuple[Streams, list[dict[str, Any]]]:
    found: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
    files = []
    for number, shard in enumerate(shards):
        for piece in tokenise(config, shard.names, tokenizer, partial(report.shard, number)):
            if isinstance(piece, dict):
                files.append(shard.entry(piece))
            else:
                found[shard.whole or piece[0]].append(piece[1])
    return {split: InMemory(found[split]) for split in SPLITS}, files


def _on_disk(
    config: DataConfig,
    shards: Sequence[Shard],
    folders: Sequence[Path],
    report: _Report,
    run: RunJobs,
) -> tuple[Streams, list[dict[str, Any]]]:
    missing = []
    for number, folder in enumerate(folders):
        if folder.exists():
            done = open_dataset(folder).info.metadata["files"]
            tokens = sum(file[split]["tokens"] for file in done for split in SPLITS)
            report.shard(number, {"tokens": tokens, "place": sum(file["size"] for file in done)})
        else:
            missing.append(number)
    asked = config.model_dump(mode="json")
    jobs = [{"kind": "tokenise", "config": asked, "names": shards[n].names} for n in missing]
    workers = config.workers or usable_cores()
    run(jobs, workers, lambda job, totals: report.shard(missing[job], totals))
    parts: dict[Split, list[tuple[Path, Split]]] = {split: [] for split in SPLITS}
    files: list[Any] = []
    for shard, folder in zip(shards, folders, strict=True):
        for split in SPLITS if share_of(config) else SPLITS[:1]:
            parts[shard.whole or split].append((folder, split))
        files += map(shard.entry, open_dataset(folder).info.metadata["files"])
    return {split: OnDisk(parts[split]) for split in SPLITS}, files


def _packing(
    config: DataConfig, context: int, tokenizer: Tokenizer, files: list[dict[str, Any]]
) -> Packing:
    """Divide the records into files, and describe them.

    Raises LrkvError for a split without a document, or too short for the context.
    """
    counts: dict[str, dict[str, int]] = {}
    divided: dict[Split, list[Piece]] = {}
    for split in SPLITS:
        counts[split] = {
            key: sum(file[split][key] for file in files) for key in ("documents", "tokens", "bytes")
        }
        if not counts[split]["documents"]:
            raise no_document(config.source, split, config.heldout)
    for split in SPLITS:
        tokens, padded = counts[split]["tokens"], split == "heldout"
        divided[split] = pieces(tokens, context, padded=padded, vocabulary=tokenizer.vocabulary)
        if not divided[split]:
            raise LrkvError(
                f"train.context = {context} is longer than the data allows ({tokens} tokens in the "
                f"{split} split): use at most {max(tokens - 1, 1)} or add documents"
            )
    metadata: dict[str, Any] = {
        "format": FORMAT,
        "source": config.source,
        "provenance": provenance_of(config),
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.vocabulary,
        "context": context,
        "versions": {"lrkv-jax": __version__} | {name: version(name) for name in _PACKAGES},
        "files": files,
        **counts,
    }
    return Packing(context, tokenizer.vocabulary, tokenizer.bos, divided, metadata)


def _key(config: DataConfig, context: int, tokenizer: Tokenizer) -> str:
    identity = [
        FORMAT,
        source_identity(config.source, config.text_column, config.heldout, config.heldout_shards),
        tokenizer.fingerprint,
        context,
    ]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
    names = [_readable(config.source), _readable(tokenizer.name), str(context), fingerprint]
    return "-".join(names)


def _readable(name: str) -> str:
    """The part of a name or path that identifies it, fit for a folder's name."""
    path = Path(name).absolute()
    stem = path.stem if path.name != "tokenizer.json" else path.parent.name
    return re.sub(r"[^\w.]+", "-", stem)[:40].strip("-.") or "root"
