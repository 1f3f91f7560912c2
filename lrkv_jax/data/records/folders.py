"""TFDS folders of token arrays in ArrayRecord files, written as a stream and opened again.

TFDS's builder keeps a split in memory until it is complete and, above 1 GB, needs
TensorFlow. Here each file is written as its rows arrive, by any process, and TFDS
describes the folder at the end, which a reader opens like any other.
"""

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from array_record.python import array_record_module

from lrkv_jax.data.sources import Split
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import flush

NAME = "tokens"
# One record to a chunk, for random access. Token ids hardly compress, and trying halves
# the speed; the checksums are there all the same.
_WRITER_OPTIONS = "group_size:1,uncompressed"
# This process among those that have its number one after the other, as containers' first have.
_START = secrets.token_hex(4)


def token_dtype(vocabulary: int, *, signed: bool = False) -> type[np.integer]:
    """The dtype of stored ids: uint16 or, where the vocabulary or a sign needs it, int32."""
    return np.uint16 if vocabulary <= 1 << 16 and not signed else np.int32


def token_features(
    length: int, vocabulary: int, *, signed: bool = False
) -> tfds.features.FeaturesDict:
    """The feature `tokens` [length] of `token_dtype`."""
    tokens = tfds.features.Tensor(
        shape=(length,),
        dtype=token_dtype(vocabulary, signed=signed),
        # Six to nine times as fast to write and read as the default, a list of varints.
        encoding=tfds.features.Encoding.BYTES,
    )
    return tfds.features.FeaturesDict({"tokens": tokens})


def file_name(split: str, number: int, of: int) -> str:
    """The name that TFDS gives to one of a split's files."""
    return f"{NAME}-{split}.array_record-{number:05d}-of-{of:05d}"


def write_file(path: Path, features: tfds.features.FeaturesDict, rows: Iterable[np.ndarray]) -> int:
    """Write rows of the features' length into an ArrayRecord file; returns their number.

    Raises OSError where the file does not hold what was written, as on a full disk.
    """
    shape, dtype, head = features["tokens"].shape, features["tokens"].np_dtype, row_head(features)
    written = 0
    try:
        writer = array_record_module.ArrayRecordWriter(str(path), _WRITER_OPTIONS)
        for row in rows:
            assert row.shape == shape
            writer.write(head + row.astype(dtype).tobytes())
            written += 1
        writer.close()
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found = _rows_of(path)
    except RuntimeError as error:  # ArrayRecord's, which begin with the system's reason
        raise OSError(str(error).split(";")[0][:120]) from error
    if found != written:
        raise OSError(f"{path.name} was cut short")
    return written


def row_head(features: tfds.features.FeaturesDict) -> bytes:
    """The bytes before the tokens in every row: names and lengths, the same in all of them."""
    zeros = np.zeros(features["tokens"].shape, features["tokens"].np_dtype)
    return features.serialize_example({"tokens": zeros})[: -zeros.nbytes]


def describe(
    folder: Path,
    features: tfds.features.FeaturesDict,
    splits: Mapping[Split, Sequence[int]],
    *,
    description: str,
    metadata: dict[str, Any],
) -> None:
    """Make a TFDS dataset of the files that were written under `file_name`s.

    splits: the number of rows in each file of a split.
    """
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=NAME, filetype_suffix="array_record"
    )
    tokens = features["tokens"]
    row_bytes = len(row_head(features)) + tokens.shape[0] * np.dtype(tokens.np_dtype).itemsize
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=list(rows),
            num_bytes=sum(rows) * row_bytes,
            filename_template=template.replace(split=split),
        )
        for split, rows in splits.items()
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
    """Return the TFDS builder of a folder that `describe` completed.

    Raises LrkvError where its description is missing or damaged, where a file is missing, and
    where a file has not as many rows as described.
    """
    fix = f"delete {path} and it will be built again"
    if not (path / "dataset_info.json").is_file():
        raise LrkvError(f"{path} is not a built dataset: {fix}")
    with quiet():
        try:
            builder = tfds.builder_from_directory(str(path))
            _ = builder.info.metadata, builder.info.features  # read on first use
            described = [
                (Path(file), rows)
                for split in builder.info.splits.values()
                for file, rows in zip(split.filepaths, split.shard_lengths, strict=True)
            ]
        # The parsers of the three JSON files raise all kinds of exceptions.
        except Exception as error:
            raise damaged(path, error) from error
    for file, rows in described:
        if not file.is_file():
            raise LrkvError(f"{file} is missing: {fix}")
        try:
            found = _rows_of(file)
        except RuntimeError as error:
            raise damaged(path, error) from error
        if found != rows:
            raise LrkvError(f"{file} has {found} rows, dataset_info.json says {rows}: {fix}")
    return builder


def _rows_of(file: Path) -> int:
    reader = array_record_module.ArrayRecordReader(str(file))
    try:
        return reader.num_records()
    finally:
        reader.close()


def damaged(path: Path, error: Exception) -> LrkvError:
    """The error of a folder that cannot be read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0][:80]
    return LrkvError(f"{path} is damaged ({reason}): delete it and it will be built again")


def make_directory(directory: str) -> None:
    """Make `data.directory` if necessary. Raises LrkvError where it cannot be made."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
        raise unwritable(directory, error) from None


def built(target: Path, directory: str, write: Callable[[Path], None]) -> Path:
    """Return `target`, a folder inside `data.directory`, after `write` has made it if necessary.

    It appears whole or not at all. Raises LrkvError where it cannot be written or is damaged.
    """
    make_directory(directory)
    try:
        if not target.is_dir():
            with quiet(), appearing(target) as scratch:
                write(scratch)
    except OSError as error:
        raise unwritable(directory, error) from None
    open_dataset(target)
    return target


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A scratch folder that is renamed to `target` if the block succeeds, and removed otherwise.

    If another process has made `target` meanwhile, that one is kept: it is the same.
    What killed processes of this machine left of the same target is removed first.
    """
    remove_abandoned(target)
    owner = f"{socket.gethostname()}.{os.getpid()}.{_START}"
    scratch = target.parent / f".building-{target.name}.{owner}.{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
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
    """Remove what killed builds of the same folder on this machine left behind."""
    prefix = f".building-{target.name}.{socket.gethostname()}."
    for folder in target.parent.iterdir() if target.parent.is_dir() else ():
        pid, _, rest = folder.name.removeprefix(prefix).partition(".")
        if folder.name.startswith(prefix) and pid.isdecimal() and not _works(int(pid), rest):
            shutil.rmtree(folder, ignore_errors=True)


def _works(pid: int, started: str) -> bool:
    """Whether a process of this machine that began a folder is still there."""
    if pid == os.getpid():
        return started.startswith(_START)
    try:
        os.kill(pid, 0)  # signal 0 tests whether the process lives
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep TFDS from logging and from drawing progress bars."""
    tfds.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def unwritable(directory: str, error: Exception) -> LrkvError:
    """The error of `data.directory` where nothing, or nothing more, can be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return LrkvError(
        f"data.directory = {directory} cannot be written ({reason}): what is complete there stays; "
        "run the same command again to continue"
    )
