"""Batches of records as a pure function of the seed and the step.

There is no iterator state to save: a checkpoint needs the step alone, and any number of
processes reads rows of the same global batch, those that its devices hold.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.records.folders import damaged, open_dataset, quiet, row_head
from lrkv_jax.data.sources import SPLITS, Split
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError


class Records:
    """One split's records by index; safe to read from many threads.

    context: targets in a record. counts: the split's documents, tokens and UTF-8 bytes.
    fingerprint: 12 hex digits of the sources' contents, wherever those are. Raises
    LrkvError where the folder is damaged or lacks the split.
    """

    def __init__(self, path: Path, split: Split):
        self._path = path
        with quiet():
            dataset = open_dataset(path)
            try:
                self._source = dataset.as_data_source(split)
                metadata = dataset.info.metadata
                self.context = int(metadata["context"])
                self.counts = metadata[split]
                self.fingerprint = _sources_of(metadata)
            except Exception as error:  # TFDS raises all kinds
                raise damaged(path, error) from error
        features = dataset.info.features
        self._head, self._dtype = row_head(features), np.dtype(features["tokens"].np_dtype)

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """int32 [len(indices), context + 1]. Raises LrkvError where a file is damaged."""
        found = np.empty((len(indices), self.context + 1), np.int32)
        try:
            # One by one: for a batch of 16, TFDS's __getitems__ spends twice as long starting
            # threads. After the head are the ids: five times as fast as TFDS's decoder.
            for row, index in zip(found, indices, strict=True):
                stored = self._source.data_source[int(index)]
                row[:] = np.frombuffer(stored, self._dtype, offset=len(self._head))
        # ArrayRecord's checksums raise all kinds of exceptions.
        except Exception as error:
            raise damaged(self._path, error) from error
        return found


def _sources_of(metadata: dict[str, Any]) -> str:
    """A hash of the content of the files, or of a mixture's sets, that records were made of."""
    files = metadata.get("files", ())
    sets = [part for split in SPLITS for part in metadata[split].get("parts", ())]
    sums = [source["sha256"] for source in (*files, *sets)]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:12]


class Loader:
    """Batches of training records; made by `make_loader`.

    records: in an epoch. tokenizer: that the records were made with. fingerprint: of the
    content of the records' sources.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: Any,
        seed: int,
        batch: int,
        rows: range,
        epochs: int | None = None,
    ):
        self._records = records
        # Index to record, reshuffled each epoch: a permutation computed, not stored.
        self._order = grain.MapDataset.range(len(records)).seed(seed).shuffle().repeat()
        self._batch = batch
        self._rows = rows
        self.records = len(records)
        self._end = epochs and epochs * self.records
        self.fingerprint = records.fingerprint
        self.tokenizer = tokenizer

    def batch_at(self, step: int) -> np.ndarray:
        """This process's rows of the batch of a step: int32 [len(rows), context + 1]."""
        return self._read(step, self._rows)

    def iterate(self, start_step: int, stop_step: int) -> Iterator[np.ndarray]:
        """`batch_at` of start_step to stop_step − 1, read ahead in background threads."""
        if start_step >= stop_step:
            return iter(())
        steps = grain.MapDataset.range(start_step, stop_step).map(self.batch_at)
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
        return iter(steps.to_iter_dataset(ahead))

    def hash_at(self, step: int) -> str:
        """12 hex digits of the sha256 of the whole global batch; the same in every process."""
        rows = self._read(step, range(self._batch))
        return hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest()[:12]

    def records_of(self, step: int) -> list[int]:
        """The training split's records in the global batch of a step, in order of its rows.

        In the last batch of the epochs there may be fewer records than rows.
        """
        return self._indices(step, range(self._batch))

    def _read(self, step: int, rows: range) -> np.ndarray:
        there = self._records.read(self._indices(step, rows))
        missing = len(rows) - len(there)
        # Complemented ids are no targets (`lrkv_jax.training.token_batch`).
        return np.pad(there, ((0, missing), (0, 0)), constant_values=~self.tokenizer.bos)

    def _indices(self, step: int, rows: range) -> list[int]:
        places = range(step * self._batch + rows.start, step * self._batch + rows.stop)
        if self._end is not None:
            places = range(places.start, max(places.start, min(places.stop, self._end)))
        return [int(self._order[place]) for place in places]


def make_loader(
    data_config: DataConfig,
    context: int,
    batch: int,
    *,
    rows: range | None = None,
    epochs: int | None = None,
    folder: Path | None = None,
) -> Loader:
    """The loader of the training split, which is built first if it is not there.

    batch: rows of the global batch; it may exceed the number of records, which then repeat.
    rows: those that this process reads (`lrkv_jax.distributed.rules.local_rows`), all unless
        given.
    epochs: after as many there is padding; without it the records repeat for ever.
    folder: of the records; without it `build_dataset` finds it by the source as it is now.
    Raises LrkvError for rows that the batch does not have, and as `build_dataset` does.
    """
    rows = range(batch) if rows is None else rows
    if not rows or rows[0] < 0 or rows[-1] >= batch:
        named = f"rows {rows.start} to {rows.stop - 1}"
        raise LrkvError(f"{named} of a batch of {batch}: use 0 to {batch - 1}")
    records = Records(folder or build_dataset(data_config, context), "train")
    tokenizer = load_tokenizer(data_config.tokenizer)
    return Loader(records, tokenizer, data_config.shuffle_seed, batch, rows, epochs)


def heldout_batches(
    data_config: DataConfig,
    context: int,
    batch: int,
    *,
    some: int | None = None,
    filled: bool = True,
    folder: Path | None = None,
) -> Iterator[np.ndarray]:
    """Every held-out record once, in order: int32 [batch, context + 1] each.

    some: only this many batches, spread evenly over the split, the same ones each time.
    filled: fill the last batch up with rows of BOS, whose targets have no bytes; it is smaller
        otherwise.
    folder: of the records; without it `build_dataset` finds it by the source as it is now.
    Raises LrkvError as `build_dataset` does, before the first batch.
    """
    records = Records(folder or build_dataset(data_config, context), "heldout")
    bos = load_tokenizer(data_config.tokenizer).bos
    count = -(-len(records) // batch)
    share = count if some is None else min(some, count)
    for number in range(share):
        start = number * count // share * batch
        rows = records.read(range(start, min(start + batch, len(records))))
        missing = filled * (batch - len(rows))
        yield np.pad(rows, ((0, missing), (0, 0)), constant_values=bos)
