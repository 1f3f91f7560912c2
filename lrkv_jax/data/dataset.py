"""The records of a configuration, whatever they are made of, built if they are not there yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.builder import Progress, appears_whole, build_dataset
from lrkv_jax.data.mixture import mixture_identity, packed
from lrkv_jax.data.sources import SPLITS
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer

_FORMAT = 1  # raise it when records of the same input change


def dataset(data_config: DataConfig, context: int, *, progress: Progress | None = None) -> Path:
    """The folder of the records of documents (`build_dataset`) or of a mixture, built if need be.

    progress(documents, tokens): called now and then with the totals so far.
    Raises LrkvError as `build_dataset` and `lrkv_jax.data.mixture.packed` do.
    """
    if data_config.mixture is None:
        return build_dataset(data_config, context, progress=progress)
    tokenizer = load_tokenizer(data_config.tokenizer)
    identity = [_FORMAT, context, mixture_identity(data_config.mixture, tokenizer)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    name = f"mixture-{Path(tokenizer.name).stem}-{context}-{digest}"

    def build(scratch: Path) -> Path:
        builder = MixtureBuilder(scratch, data_config, context, tokenizer, progress)
        builder.download_and_prepare()
        return Path(builder.data_dir)

    return appears_whole(data_config, name, build)


class MixtureBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Feature `tokens` [context + 1], int32: ids that are no targets are complemented.

    `info.metadata` has format, mixture, tokenizer, tokenizer_fingerprint, vocabulary, context and,
    under each split's name, what `lrkv_jax.data.mixture.Packed` counts and its parts.
    """

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # as for RecordsBuilder

    def __init__(
        self,
        data_dir: Path,
        data_config: DataConfig,
        context: int,
        tokenizer: Tokenizer,
        progress: Progress | None,
    ):
        self._data_config, self._context = data_config, context
        self._tokenizer, self._progress = tokenizer, progress
        super().__init__(data_dir=str(data_dir), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        tokens = tfds.features.Tensor(
            shape=(self._context + 1,), dtype=np.int32, encoding=tfds.features.Encoding.BYTES
        )
        metadata = {
            "format": _FORMAT,
            "mixture": self._data_config.mixture.model_dump(mode="json"),
            "tokenizer": self._tokenizer.name,
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "vocabulary": self._tokenizer.vocabulary,
            "context": self._context,
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Conversations packed into records of context + 1 tokens.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
            metadata=tfds.core.MetadataDict(metadata),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        result = packed(
            self._data_config, split, self._context, self._tokenizer, progress=self._progress
        )
        for key, record in enumerate(result.records):
            yield key, {"tokens": record}
        self.info.metadata[split] = {**result.counts, "parts": result.parts}

    def _log_download_bytes(self) -> None:
        """TFDS prints here; nothing is downloaded."""

    _log_download_done = _log_download_bytes
