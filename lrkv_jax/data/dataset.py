"""The records of a configuration, whatever they are made of, built if they are not there yet."""

import hashlib
import json
from pathlib import Path

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.mixture import mixture_identity, packed
from lrkv_jax.data.records.build import OnProgress, build_dataset
from lrkv_jax.data.records.folders import (
    built,
    describe,
    file_name,
    token_features,
    write_file,
)
from lrkv_jax.data.records.jobs import RunJobs
from lrkv_jax.data.sources import SPLITS
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer

_FORMAT = 1  # raise it when records of the same mixture change


def dataset(
    data_config: DataConfig,
    context: int,
    *,
    progress: OnProgress | None = None,
    run: RunJobs | None = None,
) -> Path:
    """Return the folder of a configuration's records, and build it if it does not exist.

    The records are of documents (`build_dataset`) or of a mixture.

    Raises LrkvError as `build_dataset` and `lrkv_jax.data.mixture.packed` do.
    """
    if data_config.mixture is None:
        return build_dataset(data_config, context, progress=progress, run=run)
    tokenizer = load_tokenizer(data_config.tokenizer)
    identity = [_FORMAT, context, mixture_identity(data_config.mixture, tokenizer)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    name = f"mixture-{Path(tokenizer.name).stem}-{context}-{digest}"
    target = Path(data_config.directory) / name

    def write(scratch: Path) -> None:
        _write(
            scratch, data_config, context, tokenizer, progress or (lambda what, done, total: None)
        )

    return built(target, data_config.directory, write)


def _write(
    folder: Path, config: DataConfig, context: int, tokenizer: Tokenizer, progress: OnProgress
) -> None:
    """Write a mixture's records, as int32, since ids that are no targets are complemented.

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

        def tell(done: int, number: int = number) -> None:
            progress("sets packed", done + number * len(config.mixture.train), sets)

        result = packed(config, split, context, tokenizer, progress=tell)
        written[split] = [write_file(folder / file_name(split, 0, 1), features, result.records)]
        metadata[split] = {**result.counts, "parts": result.parts}
    describe(
        folder, features, written,
        description="Conversations packed into records of context + 1 tokens.", metadata=metadata,
    )  # fmt: skip
