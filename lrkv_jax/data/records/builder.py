"""Documents to records on disk: fixed windows of tokens in a TFDS dataset of ArrayRecord files.

Records are packed offline so that the loader is index arithmetic. A record holds context + 1
tokens and shares its last one with the next record's first, so each token of a split is a target
exactly once (the first, a BOS, has no predecessor), across the source's files as within them.

Little text is done here, at once. More goes through two stages, each spread over processes: the
source's shards become streams of tokens that stay on the disk (`lrkv_jax.data.records.streams`),
and records are cut from the streams joined in order (`lrkv_jax.data.records.packing`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lrkv_jax import __version__
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.packing import pack, pieces
from lrkv_jax.data.records.pool import Run, run_jobs
from lrkv_jax.data.records.provenance import provenance_of
from lrkv_jax.data.records.staging import (
    Done,
    Progress,
    Tally,
    Tokenised,
    clean_up,
    tokenise_source,
)
from lrkv_jax.data.records.store import (
    appearing,
    check_complete,
    open_dataset,
    quiet,
    remove_abandoned,
    unwritable,
)
from lrkv_jax.data.records.writing import Plan, write_dataset
from lrkv_jax.data.sources import SPLITS, no_document, source_identity
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.errors import LrkvError

__all__ = ["Done", "Progress", "build_dataset", "open_dataset", "pack", "quiet"]

FORMAT = 2  # raise it when records of the same input change
_PACKAGES = ("numpy", "pyarrow", "tensorflow-datasets", "tiktoken", "tokenizers")


@dataclass(frozen=True)
class Stages:
    """Who does the two stages of a build.

    run: jobs of `lrkv_jax.data.records.worker`, as `pool.run_jobs`. write: the records' TFDS
    dataset into a folder, as `writing.write_dataset`. elsewhere: even little is given away.
    """

    run: Run = run_jobs
    write: Callable[[Path, DataConfig, Tokenised, Plan, Tally], None] = write_dataset
    elsewhere: bool = False


def build_dataset(
    data_config: DataConfig,
    context: int,
    *,
    progress: Progress | None = None,
    stages: Stages | None = None,
) -> Path:
    """The folder of the records for this data and context, built if it is not there yet.

    It is data_config.directory / (a readable key and a fingerprint of all that decides the
    records). It appears whole or not at all, so a killed build is never taken for a complete one
    and processes that build the same dataset at once do not disturb each other. The same command
    goes on after a kill with the shards that are missing, to the same bits.

    Splits: train (the last partial record is dropped) and heldout (it is padded with BOS, which
    stand for no bytes and so count nowhere). Their metadata has format, source, provenance,
    tokenizer, tokenizer_fingerprint, vocabulary, context, versions, `files`, and under each split's
    name its documents, tokens (BOS included) and UTF-8 bytes.

    progress: called now and then, from any thread. stages: who does the work; processes of this
    machine unless given (`lrkv_jax.data.records.beam` has others).
    Raises LrkvError for whatever `documents` and `load_tokenizer` raise it for, for a context that
    the text cannot fill, and for a folder that cannot be written or lacks files.
    """
    tokenizer = load_tokenizer(data_config.tokenizer)
    provenance_of(data_config)  # before files are looked for that are still to be fetched
    target = Path(data_config.directory) / _key(data_config, context, tokenizer)
    if target.exists():
        check_complete(target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with quiet():
            tell = progress or (lambda done: None)
            _build(data_config, context, tokenizer, target, tell, stages or Stages())
    except OSError as error:
        raise unwritable(data_config.directory, error) from None
    return target


def _build(
    config: DataConfig,
    context: int,
    tokenizer: Tokenizer,
    target: Path,
    progress: Progress,
    stages: Stages,
) -> None:
    remove_abandoned(target)
    provenance = provenance_of(config)
    tokenised, tally = tokenise_source(
        config, tokenizer, progress, stages.run, always_staged=stages.elsewhere
    )
    counts = {split: tokenised.counts(split) for split in SPLITS}
    for split in SPLITS:
        if not counts[split]["documents"]:
            raise no_document(config.source, split, config.heldout)
    divided = {
        split: pieces(
            counts[split]["tokens"],
            context,
            padded=split == "heldout",
            vocabulary=tokenizer.vocabulary,
        )
        for split in SPLITS
    }
    for split in SPLITS:
        if not divided[split]:
            raise LrkvError(
                f"train.context = {context} is longer than the data allows "
                f"({counts[split]['tokens']} tokens in the {split} split): "
                f"use at most {max(counts[split]['tokens'] - 1, 1)} or add documents"
            )
    metadata = {
        "format": FORMAT,
        "source": config.source,
        "provenance": provenance,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.vocabulary,
        "context": context,
        "versions": {"lrkv-jax": __version__} | {name: version(name) for name in _PACKAGES},
        "files": tokenised.files,
        **counts,
    }
    plan = Plan(context, tokenizer.vocabulary, tokenizer.bos, divided, metadata)
    with appearing(target) as scratch:
        stages.write(scratch, config, tokenised, plan, tally)
    check_complete(target)
    clean_up(config, tokenised, tokenizer)


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
    """The part of a name or path that tells it apart, fit for a folder's name."""
    path = Path(name).absolute()
    stem = path.stem if path.name != "tokenizer.json" else path.parent.name
    return re.sub(r"[^\w.]+", "-", stem)[:40].strip("-.") or "root"
