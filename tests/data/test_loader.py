"""Promises of the loader: batches are a function of the seed and the step, and of nothing else."""

import itertools

import numpy as np
import pytest

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.loader import Records, heldout_batches, make_loader
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.records.folders import open_dataset
from lrkv_jax.errors import LrkvError

CONTEXT = 32
LONG = 256


@pytest.fixture(scope="module")
def config(data_directory):
    """The embedded corpus: 3244 records of LONG, built once."""
    return DataConfig(directory=str(data_directory))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder of some eighty training records, few enough to go through epochs."""
    folder = tmp_path_factory.mktemp("small")
    for n in range(60):
        (folder / f"{n}.txt").write_text(f"Number {n}: " + " ".join(map(str, range(n, n + 20))))
    return DataConfig(source=str(folder), heldout=0.2, directory=str(folder / "built"))


def test_a_batch_is_a_pure_function_of_seed_and_step(config):
    first = make_loader(config, LONG, 8)
    later = make_loader(config, LONG, 8)
    expected = [first.batch_at(step) for step in range(5)]
    for step in (4, 0, 2, 2):
        np.testing.assert_array_equal(later.batch_at(step), expected[step])
    other = make_loader(config.model_copy(update={"shuffle_seed": 1}), LONG, 8)
    assert (other.batch_at(0) != expected[0]).any()
    assert expected[0].dtype == np.int32 and expected[0].shape == (8, LONG + 1)
    # The caller may write into a batch.
    first.batch_at(0)[:] = 0
    np.testing.assert_array_equal(first.batch_at(0), expected[0])
    # Iterating starts at any step, and can be left early.
    batches = list(later.iterate(7, 30))
    assert len(batches) == 23 and list(later.iterate(3, 3)) == []
    for step, batch in enumerate(batches, 7):
        np.testing.assert_array_equal(batch, first.batch_at(step))
    taken = list(itertools.islice(later.iterate(0, 10**9), 3))
    np.testing.assert_array_equal(taken[2], expected[2])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_global_batch_is_identical_for_any_number_of_processes(config, processes):
    shares = [
        make_loader(config, LONG, 8, rows=range(i * 8 // processes, (i + 1) * 8 // processes))
        for i in range(processes)
    ]
    alone = make_loader(config, LONG, 8)
    for step in (0, 1, 5000):
        together = np.concatenate([share.batch_at(step) for share in shares])
        np.testing.assert_array_equal(together, alone.batch_at(step))
        assert {share.hash_at(step) for share in shares} == {alone.hash_at(step)}
    for rows in (range(3, 9), range(-1, 3), range(0)):
        with pytest.raises(LrkvError, match="of a batch of 8: use 0 to 7"):
            make_loader(config, LONG, 8, rows=rows)


def test_each_epoch_has_every_record_once_in_another_order(small):
    loader = make_loader(small, CONTEXT, 1)
    epochs = [
        np.concatenate([loader.batch_at(step) for step in range(start, start + loader.records)])
        for start in (0, loader.records)
    ]
    everything = Records(build_dataset(small, CONTEXT), "train").read(range(loader.records))
    rows = sorted(map(tuple, everything))
    assert len(set(rows)) > 0.9 * len(rows)
    for epoch in epochs:
        assert sorted(map(tuple, epoch)) == rows
        assert (epoch != everything).any()
    assert (epochs[0] != epochs[1]).any()
    # A batch may exceed the records.
    large = make_loader(small, CONTEXT, 300)
    batches = [set(map(tuple, large.batch_at(step))) for step in (0, 1)]
    assert large.records < 300 and batches[0] == batches[1] == set(rows)


def test_heldout_batches_hold_every_record_once_in_order(small):
    path = build_dataset(small, CONTEXT)
    records, source = Records(path, "heldout"), open_dataset(path).as_data_source("heldout")
    decoded = [source[i]["tokens"] for i in range(len(source))]  # as TFDS has them
    assert len(records) % 7
    batches = list(heldout_batches(small, CONTEXT, 7))
    assert all(batch.shape == (7, CONTEXT + 1) for batch in batches)
    assert {batch.dtype for batch in batches} == {np.dtype(np.int32)}
    rows = np.concatenate(batches)
    np.testing.assert_array_equal(records.read(range(len(records))), decoded)
    np.testing.assert_array_equal(rows[: len(records)], decoded)
    bos = make_loader(small, CONTEXT, 1).tokenizer.bos
    assert (rows[len(records) :] == bos).all() and len(rows) - len(records) < 7
    rows = np.concatenate(list(heldout_batches(small, CONTEXT, 7, filled=False)))
    np.testing.assert_array_equal(rows, decoded)
    few = list(heldout_batches(small, CONTEXT, 3, some=2))
    middle = 3 * (-(-len(records) // 3) // 2)
    np.testing.assert_array_equal(few, [decoded[:3], decoded[middle : middle + 3]])


def test_a_damaged_record_is_named(small, tmp_path):
    path = build_dataset(small.model_copy(update={"directory": str(tmp_path)}), CONTEXT)
    shard = next(path.glob("*train*"))
    content = bytearray(shard.read_bytes())
    # ArrayRecord pads its blocks with zeros, where damage does not matter.
    used = [place for place, byte in enumerate(content) if byte]
    content[used[len(used) // 2]] ^= 1
    shard.write_bytes(content)
    with pytest.raises(LrkvError, match="is damaged.*delete it"):
        records = Records(path, "train")
        records.read(range(len(records)))
