"""A mixture has each conversation as often as its weight says, whole, in records of one length."""

import os
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrkv_jax.config.schema import DataConfig, MixtureConfig, MixturePart
from lrkv_jax.data.assets import FOLDER
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.loader import Records, heldout_batches, make_loader
from lrkv_jax.data.mixture import best_fit, packed
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.tables import read_json_lines
from lrkv_jax.data.tasks.registry import load, task
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError

CONTEXT = 256
TOKENIZER = load_tokenizer("sotu-4096")


def part(name, split, **how):
    return MixturePart(task=name, split=split, **how)


def data(*train, directory="unused", **how):
    heldout = (part("gsm8k", "test"),)
    mixture = MixtureConfig(train=train, heldout=heldout, folder="demo", **how)
    return DataConfig(mixture=mixture, directory=str(directory))


def conversations(records):
    """The ids of each conversation in the records, without padding."""
    found = []
    for row in records:
        ids = np.where(row < 0, ~row, row)
        starts = [*np.flatnonzero(ids == TOKENIZER.bos), len(ids)]
        assert starts[0] == 0, "a record begins with a conversation"
        pieces = [tuple(ids[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
        found += [piece for piece in pieces if len(piece) > 1]  # padding is nothing but BOS
    return Counter(found)


def rendered(name, loss="all"):
    """(ids, what of them is a target) of each conversation of a training split."""
    chat, render = ChatFormat(TOKENIZER), task(name).conversation
    return [chat.render(render(example), loss) for example in load(name, "train")]


def texts(rows, context=CONTEXT):
    return Counter(tuple(ids[: context + 1].tolist()) for ids, _ in rows)


@given(st.lists(st.integers(1, 50), max_size=80))
def test_best_fit_uses_every_item_once_and_few_bins(sizes):
    bins = best_fit(sizes, 50)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in members) for members in bins]
    assert all(load <= 50 for load in loads)
    # Two half-empty bins would have been one.
    assert sum(load <= 25 for load in loads) <= 1
    assert len(bins) <= 11 / 9 * max(-(-sum(sizes) // 50), sum(s > 25 for s in sizes)) + 4


def test_an_epoch_has_each_conversation_as_often_as_its_weight_says():
    mixed = data(part("smoltalk", "train"), part("gsm8k", "train", weight=2.5))
    result = packed(mixed, "train", CONTEXT, TOKENIZER)
    got = conversations(result.records)
    smoltalk, gsm8k = texts(rendered("smoltalk")), texts(rendered("gsm8k"))
    assert {text: got[text] for text in smoltalk} == smoltalk
    times = Counter(got[text] / gsm8k[text] for text in gsm8k)
    assert set(times) == {2, 3} and times[3] == pytest.approx(sum(times.values()) / 2, abs=1)
    assert got.total() == result.counts["documents"]
    assert got.total() == sum(part["conversations"] for part in result.parts)
    again = packed(mixed, "train", CONTEXT, TOKENIZER)
    np.testing.assert_array_equal(again.records, result.records)
    other = packed(data(part("gsm8k", "train", weight=0.5), seed=1), "train", CONTEXT, TOKENIZER)
    assert conversations(other.records).total() == 48


def test_the_targets_are_what_the_loss_says_and_padding_is_none():
    for loss in ("all", "assistant"):
        result = packed(data(part("gsm8k", "train"), loss=loss), "train", CONTEXT, TOKENIZER)
        rows = rendered("gsm8k", loss)
        assert (result.records >= 0).sum() == sum(counted.sum() for _, counted in rows)
        assert result.counts["targets"] == (result.records >= 0).sum()
        assert result.counts["tokens"] == sum(len(ids) for ids, _ in rows)
        padding = result.records == ~TOKENIZER.bos
        assert padding.sum() >= result.records.size - result.counts["tokens"]
    # A conversation that is longer than a record loses its end, and is counted.
    result = packed(data(part("gsm8k", "train")), "train", 64, TOKENIZER)
    assert conversations(result.records) == texts(rows, 64)
    assert result.counts["cut"] == sum(len(ids) > 65 for ids, _ in rows) > 0


def test_a_built_mixture_is_read_as_any_other_data(tmp_path):
    mixed = data(part("mmlu", "auxiliary_train"), directory=tmp_path)
    path = build_dataset(mixed, CONTEXT)
    result = packed(mixed, "train", CONTEXT, TOKENIZER)
    records = Records(path, "train")
    np.testing.assert_array_equal(records.read(range(len(records))), result.records)
    assert records.counts["parts"] == result.parts and records.counts["bytes"] > 0
    assert build_dataset(mixed, CONTEXT) == path
    assert build_dataset(data(part("mmlu", "dev"), directory=tmp_path), CONTEXT) != path
    assert next(heldout_batches(mixed, CONTEXT, 2)).shape == (2, CONTEXT + 1)


def test_a_mixture_belongs_to_the_content_of_its_sets(tmp_path):
    gsm8k = tmp_path / "sets/gsm8k/main"
    gsm8k.mkdir(parents=True)
    train, test = (gsm8k / f"{split}-0-of-1.parquet" for split in ("train", "test"))
    for path in (train, test):
        rows = read_json_lines(FOLDER / f"demo/gsm8k-{path.name.split('-')[0]}.jsonl")
        pq.write_table(pa.Table.from_pylist([row for _, row in rows]), path)

    def found(folder):
        mixed = data(part("gsm8k", "train"), directory=tmp_path / "built")
        sets = mixed.mixture.model_copy(update={"folder": str(folder)})
        return build_dataset(mixed.model_copy(update={"mixture": sets}), CONTEXT)

    path = found(tmp_path / "sets")
    os.utime(train, ns=(10**18, 10**18))
    copy = shutil.copytree(tmp_path / "sets", tmp_path / "copy", copy_function=shutil.copyfile)
    assert found(tmp_path / "sets") == found(copy) == path
    shutil.copyfile(train, copy / "gsm8k/main" / test.name)
    assert found(copy) != path


def test_epochs_have_each_record_exactly_so_often_and_then_nothing(tmp_path):
    mixed = data(part("gsm8k", "train"), directory=tmp_path)
    records = Records(build_dataset(mixed, CONTEXT), "train")
    loader = make_loader(mixed, CONTEXT, 10, epochs=2)
    steps = -(-2 * len(records) // 10)
    assert 2 * len(records) % 10, "the last batch should be a partial one"
    rows = np.concatenate([loader.batch_at(step) for step in range(steps)])
    own = 2 * len(records)
    seen = Counter(map(bytes, rows[:own]))
    assert set(seen.values()) == {2} and len(seen) == len(records)
    assert len(rows) > own and (rows[own:] == ~TOKENIZER.bos).all()
    for part_ in (range(5), range(5, 10)):
        share = make_loader(mixed, CONTEXT, 10, rows=part_, epochs=2)
        np.testing.assert_array_equal(share.batch_at(steps - 1), rows[-10:][part_])
    assert len(loader.records_of(steps - 1)) == own % 10


def test_a_mixture_of_nothing_and_one_past_any_memory_are_refused():
    with pytest.raises(LrkvError, match="data.mixture.train takes no conversation"):
        packed(data(part("gsm8k", "train", weight=0.001)), "train", CONTEXT, TOKENIZER)
    with pytest.raises(LrkvError, match="weight = 1e.300 should be less than or equal to 1000"):
        part("gsm8k", "train", weight=1e300)


def test_a_mixture_of_absent_sets_is_named_and_leaves_nothing(tmp_path):
    mixed = data(part("gsm8k", "train"), directory=tmp_path)
    elsewhere = mixed.mixture.model_copy(update={"folder": str(tmp_path / "none")})
    with pytest.raises(LrkvError, match="none/gsm8k holds no .*fetch it with `lrkv data fetch"):
        build_dataset(mixed.model_copy(update={"mixture": elsewhere}), CONTEXT)
    assert not any(path.name.startswith(".building") for path in tmp_path.iterdir())
