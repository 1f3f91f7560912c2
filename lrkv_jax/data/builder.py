"""Documents to records on disk: fixed windows of tokens in a TFDS dataset of ArrayRecord files.

Records are packed offline so that the loader is index arithmetic. A record holds context + 1
tokens and shares its last one with the next record's first, so each token of a split is a target
exactly once (the first, a BOS, has no predecessor).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.sources import SPLITS, documents, source_identity
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.errors import LrkvError

FORMAT = 1  # raise it when records of the same input change
Progress = Callable[[int, int], None]

_CHUNK_CHARACTERS = 1 << 20  # enough to keep the tokenizers' threads busy, little memory


class RecordsBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Feature `tokens` [context + 1], uint16 or, where the vocabulary needs it, int32.

    Splits: train (the last partial record is dropped) and heldout (it is padded with BOS, which
    stand for no bytes and so count nowhere). `info.metadata` has format, source, tokenizer,
    tokenizer_fingerprint, vocabulary, context and, under each split's name, its documents, tokens
    (BOS included) and UTF-8 bytes.
    """

    VERSION = tfds.core.Version("1.0.0")
    # TFDS looks for download checksums beside this module, with importlib_resources, a package
    # that it does not install from Python 3.9 on. Nothing is downloaded here.
    code_path = None

    def __init__(
        self,
        *,
        data_dir: str,
        data_config: DataConfig,
        context: int,
        tokenizer: Tokenizer,
        progress: Progress | None = None,
    ):
        self._data_config = data_config
        self._context = context
        self._tokenizer = tokenizer
        self._progress = progress or (lambda documents, tokens: None)
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        small = self._tokenizer.vocabulary <= 1 << 16
        tokens = tfds.features.Tensor(
            shape=(self._context + 1,),
            dtype=np.uint16 if small else np.int32,
            # Six to nine times as fast to write and read as the default, a list of varints.
            encoding=tfds.features.Encoding.BYTES,
        )
        metadata = {
            "format": FORMAT,
            "source": self._data_config.source,
            "tokenizer": self._tokenizer.name,
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "vocabulary": self._tokenizer.vocabulary,
            "context": self._context,
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Records of context + 1 tokens for language modelling.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
            metadata=tfds.core.MetadataDict(metadata),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        bos = self._tokenizer.bos
        dtype = self.info.features["tokens"].np_dtype
        counts = {"documents": 0, "tokens": 0, "bytes": 0}
        padding = bos if split == "heldout" else None
        key = -1
        records = pack(self._tokens(split, counts), self._context, padding)
        for key, record in enumerate(records):
            yield key, {"tokens": record.astype(dtype)}
        self.info.metadata[split] = counts
        if key < 0:
            raise LrkvError(
                f"train.context = {self._context} is longer than the data allows "
                f"({counts['tokens']} tokens in the {split} split): "
                f"use at most {max(counts['tokens'] - 1, 1)} or add documents"
            )

    def _tokens(self, split: str, counts: dict[str, int]) -> Iterator[np.ndarray]:
        """The split's token stream in pieces, BOS before each document; fills `counts`."""
        config, tokenizer = self._data_config, self._tokenizer
        texts = documents(
            config.source, split, text_column=config.text_column, heldout=config.heldout
        )
        seen = self.info.metadata.get("train", {"documents": 0, "tokens": 0})
        bos = np.array([tokenizer.bos], np.int32)
        for chunk in _chunks(texts):
            encoded = tokenizer.encode_batch(chunk)
            ids = np.concatenate([part for document in encoded for part in (bos, document)])
            counts["documents"] += len(chunk)
            counts["tokens"] += len(ids)
            counts["bytes"] += int(tokenizer.token_bytes[ids].sum(dtype=np.int64))
            self._progress(*(seen[name] + counts[name] for name in ("documents", "tokens")))
            yield ids

    def _log_download_bytes(self) -> None:
        """TFDS prints here; nothing is downloaded and the caller has `progress`."""

    _log_download_done = _log_download_bytes


def pack(pieces: Iterator[np.ndarray], context: int, padding: int | None) -> Iterator[np.ndarray]:
    """Cuts a token stream into records [context + 1] that overlap by one token.

    pieces: the stream, int [any length] each. padding: the id that fills the last partial record;
    None drops that record. Of n tokens, records keep n − 1 targets (padded) or a multiple of
    context of them (dropped).
    """
    pending = np.empty(0, np.int32)
    for piece in pieces:
        pending = np.concatenate([pending, piece])
        whole = max(len(pending) - 1, 0) // context
        for start in range(0, whole * context, context):
            yield pending[start : start + context + 1]
        pending = pending[whole * context :]
    if padding is not None and len(pending) > 1:
        yield np.pad(pending, (0, context + 1 - len(pending)), constant_values=padding)


def build_dataset(
    data_config: DataConfig, context: int, *, progress: Progress | None = None
) -> Path:
    """The folder of the records for this data and context, built if it is not there yet.

    It is data_config.directory / (a readable key and a fingerprint of all that decides the
    records). It appears whole or not at all, so a killed build is never taken for a complete one
    and processes that build the same dataset at once do not disturb each other.

    progress(documents, tokens): called now and then with the totals so far.
    Raises LrkvError for whatever `documents` and `load_tokenizer` raise it for, for a context that
    the text cannot fill, and for a folder that cannot be written or lacks files.
    """
    tokenizer = load_tokenizer(data_config.tokenizer)

    def build(scratch: Path) -> Path:
        builder = RecordsBuilder(
            data_dir=str(scratch),
            data_config=data_config,
            context=context,
            tokenizer=tokenizer,
            progress=progress,
        )
        builder.download_and_prepare()
        return Path(builder.data_dir)

    return appears_whole(data_config, _key(data_config, context, tokenizer), build)


def appears_whole(data_config: DataConfig, name: str, build: Callable[[Path], Path]) -> Path:
    """data_config.directory / `name`, complete; made by `build` if it is not there.

    build(scratch) returns the folder that it has made under `scratch`; it is moved into place.
    Raises LrkvError for a folder that cannot be written or lacks files.
    """
    target = Path(data_config.directory) / name
    if target.exists():
        _check_complete(target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        prefix = f".building-{target.name}.{socket.gethostname()}.{os.getpid()}."
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        raise _unwritable(data_config, error) from None
    try:
        with quiet():
            built = build(scratch)
        try:
            os.rename(built, target)
        except OSError:
            # Another process was faster; its records are the same.
            if not target.exists():
                raise
        _check_complete(target)
    except OSError as error:
        raise _unwritable(data_config, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def open_dataset(path: Path) -> Any:
    """The TFDS builder of a folder that `build_dataset` returned.

    Raises LrkvError where its description is damaged.
    """
    with quiet():
        try:
            builder = tfds.builder_from_directory(str(path))
            _ = builder.info.metadata  # read on first use
            return builder
        # The parsers of the three JSON files raise what they like.
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:80]
            raise LrkvError(
                f"{path} is damaged ({reason}): delete it and it will be built again"
            ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps TFDS from logging and from drawing progress bars."""
    tfds.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _key(config: DataConfig, context: int, tokenizer: Tokenizer) -> str:
    identity = [
        FORMAT,
        source_identity(config.source, config.text_column, config.heldout),
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


def _check_complete(path: Path) -> None:
    mend = f"delete {path} and it will be built again"
    if not (path / "dataset_info.json").is_file():
        raise LrkvError(f"{path} is not a built dataset: {mend}")
    for split in open_dataset(path).info.splits.values():
        for file in split.filepaths:
            if not Path(file).is_file():
                raise LrkvError(f"{file} is missing: {mend}")


def _remove_abandoned(target: Path) -> None:
    """Removes what killed builds of the same dataset on this machine left behind."""
    prefix = f".building-{target.name}.{socket.gethostname()}."
    for folder in target.parent.iterdir():
        pid = folder.name.removeprefix(prefix).split(".")[0]
        if folder.name.startswith(prefix) and pid.isdigit():
            try:
                os.kill(int(pid), 0)  # signal 0 asks whether the process lives
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except PermissionError:
                pass


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of documents of about `_CHUNK_CHARACTERS` together."""
    for first in texts:
        chunk, size = [first], len(first)
        while size < _CHUNK_CHARACTERS:
            more = list(itertools.islice(texts, 1))
            if not more:
                break
            chunk += more
            size += len(more[0])
        yield chunk


def _unwritable(config: DataConfig, error: OSError) -> LrkvError:
    reason = error.strerror or str(error)
    return LrkvError(f"data.directory = {config.directory} cannot be written ({reason})")
