"""TFDS folders of token arrays in ArrayRecord files, written as a stream and opened again.

TFDS's own builder keeps a split in memory until it is complete and, above 1 GB, needs TensorFlow.
Here each file is written as its rows come, by any process, and TFDS describes the folder at the
end; what reads it cannot tell the difference.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from array_record.python import array_record_module

from lrkv_jax.disk import flush
from lrkv_jax.errors import LrkvError

NAME = "tokens"
# One record to a chunk, for random access. Token ids hardly compress, and trying halves the speed;
# the checksums are there all the same.
_WRITER_OPTIONS = "group_size:1,uncompressed"


class Written(NamedTuple):
    """What a file holds: its rows, and the bytes of them."""

    rows: int
    bytes: int


def token_features(
    length: int, vocabulary: int, *, signed: bool = False
) -> tfds.features.FeaturesDict:
    """The feature `tokens` [length], uint16 or, where the vocabulary or a sign needs it, int32."""
    tokens = tfds.features.Tensor(
        shape=(length,),
        dtype=np.uint16 if vocabulary <= 1 << 16 and not signed else np.int32,
        # Six to nine times as fast to write and read as the default, a list of varints.
        encoding=tfds.features.Encoding.BYTES,
    )
    return tfds.features.FeaturesDict({"tokens": tokens})


def file_name(split: str, number: int, of: int) -> str:
    """What TFDS calls one of a split's files."""
    return f"{NAME}-{split}.array_record-{number:05d}-of-{of:05d}"


class TokenWriter:
    """One ArrayRecord file of rows of tokens; call `close` to have it on the disk."""

    def __init__(self, path: Path, features: tfds.features.FeaturesDict):
        self._path = path
        self._shape, self._dtype = features["tokens"].shape, features["tokens"].np_dtype
        self._head = _head(features)
        self._written = Written(0, 0)
        self._writer = array_record_module.ArrayRecordWriter(str(path), _WRITER_OPTIONS)

    def write(self, row: np.ndarray) -> None:
        """Append one row of the features' length; raises OSError where there is no room."""
        assert row.shape == self._shape
        serialized = self._head + row.astype(self._dtype).tobytes()
        with _as_os_error():
            self._writer.write(serialized)
        rows, size = self._written
        self._written = Written(rows + 1, size + len(serialized))

    def close(self) -> Written:
        """Raises OSError where the file does not hold what was written, as on a full disk."""
        with _as_os_error():
            self._writer.close()
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
            reader = array_record_module.ArrayRecordReader(str(self._path))
            found = reader.num_records()
            reader.close()
        if found != self._written.rows:
            raise OSError(f"{self._path.name} was cut short")
        return self._written


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """ArrayRecord's own errors say what the system said, in their first words."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error).split(";")[0][:120]) from error


class TokenRows:
    """The rows of one split of a folder, by number."""

    def __init__(self, path: Path, split: str):
        with quiet():
            dataset = open_dataset(path)
            self._source = dataset.as_data_source(split).data_source
        self._path = path
        self._head = _head(dataset.info.features)
        self._dtype = dataset.info.features["tokens"].np_dtype

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> np.ndarray:
        """Raises LrkvError where the file is damaged."""
        try:
            serialized = self._source[index]
        # ArrayRecord's checksums raise what they like.
        except Exception as error:
            raise damaged(self._path, error) from error
        return np.frombuffer(serialized, self._dtype, offset=len(self._head))


def _head(features: tfds.features.FeaturesDict) -> bytes:
    """What stands before the tokens in every row: names and lengths, the same in all of them."""
    zeros = np.zeros(features["tokens"].shape, features["tokens"].np_dtype)
    return features.serialize_example({"tokens": zeros})[: -zeros.nbytes]


def describe(
    folder: Path,
    features: tfds.features.FeaturesDict,
    splits: Mapping[str, Sequence[Written]],
    *,
    description: str,
    metadata: dict[str, Any],
) -> None:
    """Make a TFDS dataset of the files that were written under `file_name`s."""
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=NAME, filetype_suffix="array_record"
    )
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[file.rows for file in files],
            num_bytes=sum(file.bytes for file in files),
            filename_template=template.replace(split=split),
        )
        for split, files in splits.items()
    ]
    with quiet():
        tfds.folder_dataset.write_metadata(
            data_dir=str(folder),
            features=features,
            split_infos=infos,
            check_data=False,  # it reads with TensorFlow
            description=description,
            metadata=tfds.core.MetadataDict(metadata),
            disable_shuffling=True,
        )


def open_dataset(path: Path) -> Any:
    """The TFDS builder of a folder that `describe` completed.

    Raises LrkvError where its description is damaged.
    """
    with quiet():
        try:
            builder = tfds.builder_from_directory(str(path))
            _ = builder.info.metadata  # read on first use
            return builder
        # The parsers of the three JSON files raise what they like.
        except Exception as error:
            raise damaged(path, error) from error


def check_complete(path: Path) -> None:
    """Raises LrkvError where a built folder lacks its description or one of its files."""
    mend = f"delete {path} and it will be built again"
    if not (path / "dataset_info.json").is_file():
        raise LrkvError(f"{path} is not a built dataset: {mend}")
    for split in open_dataset(path).info.splits.values():
        for file in split.filepaths:
            if not Path(file).is_file():
                raise LrkvError(f"{file} is missing: {mend}")


def damaged(path: Path, error: Exception) -> LrkvError:
    """The error of a folder that cannot be read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0][:80]
    return LrkvError(f"{path} is damaged ({reason}): delete it and it will be built again")


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A scratch folder that takes the name `target` when the block ends well, and else goes.

    Where another process has made `target` meanwhile, that one stays: it is the same. What killed
    processes of this machine left of the same target is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    prefix = f".building-{target.name}.{socket.gethostname()}.{os.getpid()}."
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o777 & ~_umask())  # mkdtemp's folder is for its owner alone
        flush(scratch)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.exists():
                raise
        flush(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_abandoned(target: Path) -> None:
    """Removes what killed builds of the same folder on this machine left behind."""
    prefix = f".building-{target.name}.{socket.gethostname()}."
    for folder in target.parent.iterdir() if target.parent.is_dir() else ():
        pid = folder.name.removeprefix(prefix).split(".")[0]
        if folder.name.startswith(prefix) and pid.isdigit():
            try:
                os.kill(int(pid), 0)  # signal 0 asks whether the process lives
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except PermissionError:
                pass


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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


def write_all(
    path: Path, features: tfds.features.FeaturesDict, rows: Iterable[np.ndarray]
) -> Written:
    """A whole file at once; raises as `TokenWriter.close` does."""
    writer = TokenWriter(path, features)
    for row in rows:
        writer.write(row)
    return writer.close()


def unwritable(directory: str, error: OSError) -> LrkvError:
    """The error of `data.directory` where nothing can be written, or no more."""
    reason = error.strerror or str(error)
    return LrkvError(
        f"data.directory = {directory} cannot be written ({reason}): what is complete there stays, "
        "and the same command goes on from it"
    )
