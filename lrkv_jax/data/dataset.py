"""The records of a configuration, whatever they are made of, built if they are not there yet."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.mixture import mixture_identity, packed
from lrkv_jax.data.records.builder import Done, Progress, Stages, build_dataset
from lrkv_jax.data.records.store import (
    appearing,
    check_complete,
    describe,
    file_name,
    quiet,
    token_features,
    unwritable,
    write_all,
)
from lrkv_jax.data.sources import SPLITS
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer

_FORMAT = 1  # raise it when records of the same mixture change


def dataset(
    data_config: DataConfig,
    context: int,
    *,
    progress: Progress | None = None,
    stages: Stages | None = None,
) -> Path:
    """The folder of the records of documents (`build_dataset`) or of a mixture, built if need be.

    Raises LrkvError as `build_dataset` and `lrkv_jax.data.mixture.packed` do.
    """
    if data_config.mixture is None:
        return build_dataset(data_config, context, progress=progress, stages=stages)
    tokenizer = load_tokenizer(data_config.tokenizer)
    identity = [_FORMAT, context, mixture_identity(data_config.mixture, tokenizer)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    name = f"mixture-{Path(tokenizer.name).stem}-{context}-{digest}"
    target = Path(data_config.directory) / name
    if not target.exists():
        try:
            with quiet(), appearing(target) as scratch:
                _write(scratch, data_config, context, tokenizer, progress or (lambda done: None))
        except OSError as error:
            raise unwritable(data_config.directory, error) from None
    check_complete(target)
    return target


def _write(
    folder: Path, config: DataConfig, context: int, tokenizer: Tokenizer, progress: Progress
) -> None:
    """A mixture's records: int32, since ids that are no targets are complemented.

    The metadata has format, mixture, tokenizer, tokenizer_fingerprint, vocabulary, context and,
    under each split's name, what `lrkv_jax.data.mixture.Packed` counts and its parts.
    """
    features = token_features(context + 1, tokenizer.vocabulary, signed=True)
    metadata = {
        "format": _FORMAT,
        "mixture": config.mixture.model_dump(mode="json"),
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocabulary": tokenizer.vocabulary,
        "context": context,
    }
    written = {}
    sets = len(config.mixture.train) + len(config.mixture.heldout)
    for number, split in enumerate(SPLITS):

        def tell(documents: int, tokens: int, sets_done: int, number: int = number) -> None:
            done = sets_done + number * len(config.mixture.train)
            progress(Done(documents, tokens, done, sets, done, sets, 0, 0))

        result = packed(config, split, context, tokenizer, progress=tell)
        written[split] = [write_all(folder / file_name(split, 0, 1), features, result.records)]
        metadata[split] = {**result.counts, "parts": result.parts}
    describe(
        folder, features, written,
        description="Conversations packed into records of context + 1 tokens.", metadata=metadata,
    )  # fmt: skip
