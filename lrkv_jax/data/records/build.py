"""Documents to records on disk: fixed windows of tokens in a TFDS dataset of ArrayRecord files.

Records are packed offline so that the loader is index arithmetic. A record holds context + 1
tokens and shares its last one with the next record's first, so each token of a split is a target
exactly once, also across the source's files. (The first, a BOS, has no predecessor.)

The source's files are grouped to shards, and each shard becomes a stream of ids on the disk
(`lrkv_jax.data.records.streams`). Records are cut from the joined streams of a split.
A manifest is written next to them.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lrkv_jax import __version__
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.hub import provenance_of
from lrkv_jax.data.mixture import OnProgress, build_mixture
from lrkv_jax.data.records.folders import (
    built,
    describe,
    file_name,
    make_directory,
    remove_abandoned,
    token_features,
)
from lrkv_jax.data.records.jobs import Job, RunJobs, run_here, run_jobs
from lrkv_jax.data.records.streams import (
    entries_of,
    record_ranges,
    share_of,
    stream_folder,
    write_records,
    write_stream,
)
from lrkv_jax.data.sources import (
    EMBEDDED,
    SPLITS,
    Split,
    embedded_identity,
    file_identities,
    file_names,
    file_times,
    no_document,
    whole_files,
)
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.distributed.hardware import usable_cores
from lrkv_jax.errors import LrkvError

FORMAT = 2  # raise it when records of the same input change
_PACKAGES = ("numpy", "pyarrow", "tensorflow-datasets", "tiktoken", "tokenizers")

# This much input takes seconds: it is not worth processes.
_LITTLE_BYTES = 16 << 20
# Small files are tokenized together up to here; a larger one is a shard by itself.
SHARD_BYTES = 8 << 20


@dataclass(frozen=True)
class Shard:
    """`file_identities` tokenized together. whole: the split that they are in as whole files."""

    files: list[list[Any]]
    size: int
    whole: Split | None

    def entry(self, file: dict[str, Any]) -> dict[str, Any]:
        """A file's entry, counted under the split that the file is in."""
        if self.whole == "heldout":
            return file | {"train": file["heldout"], "heldout": file["train"]}
        return file


def build_dataset(
    data_config: DataConfig,
    context: int,
    *,
    progress: OnProgress | None = None,
    run: RunJobs | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the folder of the records of this data and context, built if it does not exist.

    Those of a mixture are `lrkv_jax.data.mixture.build_mixture`'s. Those of documents are in
    data_config.directory / (a readable key, and fingerprints of the settings and of the content
    that decide the records); without its source, the only folder of the settings is taken, and
    `warn` gets a line. A folder appears whole or not at all, so a killed build is never taken for a
    complete one and processes that build the same dataset at once do not disturb each other. After
    a kill the same command continues with the shards that are missing, to the same bits.

    Splits: train (the last partial record is dropped) and heldout (it is padded with BOS, which
    have no bytes and so count nowhere). Their metadata has format, source, provenance,
    tokenizer, tokenizer_fingerprint, vocabulary, context, versions, `files`, and under each split's
    name its documents, tokens (BOS included) and UTF-8 bytes.

    progress: called whenever a shard or a file of records is done. run: does the work
    (`lrkv_jax.data.records.jobs`); unless given, processes of this machine do what is much.

    Raises LrkvError for whatever `documents` and `load_tokenizer` raise it for, for a context that
    the text cannot fill, and for a folder that cannot be written or is damaged.
    """
    report = progress or (lambda what, done, total: None)
    if data_config.mixture is not None:
        return build_mixture(data_config, context, progress=report)
    tokenizer = load_tokenizer(data_config.tokenizer)
    target = _target(data_config, context, tokenizer, warn)

    def write(scratch: Path) -> None:
        _write(scratch, data_config, context, tokenizer, report, run)

    return built(target, data_config.directory, write)


def _write(
    scratch: Path,
    config: DataConfig,
    context: int,
    tokenizer: Tokenizer,
    progress: OnProgress,
    run: RunJobs | None,
) -> None:
    shards = _shards(config)
    folders = [stream_folder(config, shard.files, tokenizer) for shard in shards]
    much = config.workers is not None or sum(shard.size for shard in shards) > _LITTLE_BYTES
    workers, runner = config.workers or usable_cores(), run or (run_jobs if much else run_here)

    def do(jobs: Sequence[Job]) -> Iterable[int]:
        return runner(jobs, workers)

    parts, files = _tokenize(config, shards, folders, do, progress)
    counts = _counts(config, files)
    ranges = _ranges(context, tokenizer, counts)
    _pack(scratch, context, tokenizer, parts, ranges, do, progress)
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
    describe(
        scratch,
        token_features(context + 1, tokenizer.vocabulary),
        {split: list(map(len, ranges[split])) for split in SPLITS},
        description="Records of context + 1 tokens for language modeling.",
        metadata=metadata,
    )
    for folder in folders:
        remove_abandoned(folder)


def _shards(config: DataConfig) -> list[Shard]:
    """Group the source's files, in order: small neighbors of one split are tokenized together."""
    names = file_names(config.source)
    whole = whole_files(config.source, names, config.heldout_shards)
    shards: list[Shard] = []
    for file in _identities(config, names):
        name, size, _ = file
        last = shards[-1] if shards else None
        if last and last.size + size <= SHARD_BYTES and last.whole == whole.get(name):
            shards[-1] = Shard([*last.files, file], last.size + size, last.whole)
        else:
            shards.append(Shard([file], size, whole.get(name)))
    return shards


Parts = dict[Split, list[tuple[Path, Split]]]
Do = Callable[[Sequence[Job]], Iterable[int]]


def _tokenize(
    config: DataConfig,
    shards: Sequence[Shard],
    folders: Sequence[Path],
    do: Do,
    progress: OnProgress,
) -> tuple[Parts, list[dict[str, Any]]]:
    """Write the streams that are missing; returns those of each split, and the files' entries."""
    missing = [number for number, folder in enumerate(folders) if not folder.exists()]
    sizes = [shard.size for shard in shards]
    done = sum(sizes) - sum(sizes[number] for number in missing)
    progress("bytes read", done, sum(sizes))
    jobs = [partial(write_stream, config, shards[n].files, folders[n]) for n in missing]
    for job in do(jobs):
        done += sizes[missing[job]]
        progress("bytes read", done, sum(sizes))
    parts: Parts = {split: [] for split in SPLITS}
    files: list[dict[str, Any]] = []
    for shard, folder in zip(shards, folders, strict=True):
        for split in SPLITS if shard.whole is None else SPLITS[:1]:
            parts[shard.whole or split].append((folder, split))
        files += map(shard.entry, entries_of(folder))
    return parts, files


def _counts(config: DataConfig, files: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Each split's documents, tokens and bytes; raises LrkvError for one without a document."""
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        counts[split] = {
            key: sum(file[split][key] for file in files) for key in ("documents", "tokens", "bytes")
        }
        if not counts[split]["documents"]:
            raise no_document(config.source, split, config.heldout)
    return counts


def _ranges(
    context: int, tokenizer: Tokenizer, counts: dict[str, dict[str, int]]
) -> dict[Split, list[range]]:
    """The records of each file of each split; raises LrkvError for a split that is too short."""
    ranges = {}
    for split in SPLITS:
        tokens, padded = counts[split]["tokens"], split == "heldout"
        ranges[split] = record_ranges(
            tokens, context, padded=padded, vocabulary=tokenizer.vocabulary
        )
        if not ranges[split]:
            raise LrkvError(
                f"train.seq_len = {context} is longer than the data allows ({tokens} tokens in the "
                f"{split} split): use at most {max(tokens - 1, 1)} or add documents"
            )
    return ranges


def _pack(
    folder: Path,
    context: int,
    tokenizer: Tokenizer,
    parts: Parts,
    ranges: dict[Split, list[range]],
    do: Do,
    progress: OnProgress,
) -> None:
    """Write the files of records."""
    jobs, sizes = [], []
    for split in SPLITS:
        for number, records in enumerate(ranges[split]):
            path = folder / file_name(split, number, len(ranges[split]))
            cut = context, tokenizer.bos, tokenizer.vocabulary
            jobs.append(partial(write_records, path, parts[split], records, *cut))
            sizes.append(len(records) * context)
    done = 0
    for job in do(jobs):
        done += sizes[job]
        progress("tokens packed", done, sum(sizes))
    # Of a worker that was killed, where another has written the same file.
    for left in folder.glob(".*.array_record-*"):
        left.unlink(missing_ok=True)


def _target(
    config: DataConfig, context: int, tokenizer: Tokenizer, warn: Callable[[str], None]
) -> Path:
    """The folder of the records of this data, there or not."""
    names = [_readable(config.source), _readable(tokenizer.name), str(context)]
    start = str(Path(config.directory, "-".join(names)))

    def fingerprint(files: list[Any] | None) -> str:
        source = [files, config.text_column, share_of(config), config.heldout_shards]
        if config.source == EMBEDDED:
            source = embedded_identity()
        identity = [FORMAT, source, tokenizer.fingerprint, context]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]

    settings = fingerprint(None)
    if config.source == EMBEDDED:
        return Path(f"{start}-{settings}")
    try:
        files = file_names(config.source)
    except LrkvError:
        # The records are enough, unless it is unclear which.
        complete = glob(f"{escape(f'{start}-{settings}')}-*")
        if len(complete) == 1:
            warn(f"data.source = {config.source} is not there: the records {complete[0]} are used")
            return Path(complete[0])
        provenance_of(config)  # knows what is still to be fetched
        raise
    provenance_of(config)
    make_directory(config.directory)
    # As earlier versions named them, from which a copy had another name than the original.
    earlier = Path(f"{start}-{fingerprint(file_times(config.source, files))}")
    if earlier.is_dir():
        return earlier
    return Path(f"{start}-{settings}-{fingerprint(_identities(config, files))}")


def _identities(config: DataConfig, names: list[str]) -> list[list[Any]]:
    return file_identities(config.source, names, Path(config.directory, "sources.json"))


def _readable(name: str) -> str:
    """The part of a name or path that identifies it, fit for a folder's name."""
    path = Path(name).absolute()
    stem = path.stem if path.name != "tokenizer.json" else path.parent.name
    return re.sub(r"[^\w.]+", "-", stem)[:40].strip("-.") or "root"
