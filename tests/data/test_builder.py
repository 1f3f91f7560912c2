"""Promises of the builder: every token a target once, whole or not at all, keyed by its input."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records import builder as builder_module
from lrkv_jax.data.records import writing
from lrkv_jax.data.records.builder import build_dataset, open_dataset, pack
from lrkv_jax.data.sources import documents
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError


@pytest.fixture
def config(tmp_path):
    """Sixty short documents in a folder, about a third of them held out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n:02}.txt").write_text(f"Document {n} says: " + "and so on, " * (n % 7))
    directory = str(tmp_path / "built")
    return DataConfig(source=str(folder), heldout=0.3, directory=directory)


def records(path, split):
    source = open_dataset(path).as_data_source(split)
    return np.stack([source[i]["tokens"] for i in range(len(source))])


def stream(config, split):
    """The split's tokens made by hand."""
    tokenizer = load_tokenizer(config.tokenizer)
    ids = []
    for text in documents(config.source, split, heldout=config.heldout):
        ids += [tokenizer.bos, *tokenizer.encode(text)]
    return np.array(ids)


@given(
    pieces=st.lists(st.lists(st.integers(1, 99), max_size=30), max_size=8),
    context=st.integers(1, 12),
)
def test_packing_makes_each_token_a_target_exactly_once(pieces, context):
    tokens = np.array([token for piece in pieces for token in piece], np.int32)
    arrays = [np.array(piece, np.int32) for piece in pieces]
    padded = list(pack(iter(arrays), context, 0))
    dropped = list(pack(iter(arrays), context, None))
    targets = np.concatenate([np.empty(0, np.int32), *(record[1:] for record in padded)])
    inputs = np.concatenate([np.empty(0, np.int32), *(record[:-1] for record in padded)])
    np.testing.assert_array_equal(targets[targets != 0], tokens[1:])
    np.testing.assert_array_equal(inputs[inputs != 0][: len(tokens[:-1])], tokens[:-1])
    assert (targets[len(tokens[1:]) :] == 0).all() and len(targets) - len(tokens) < context
    assert len(dropped) == max(len(tokens) - 1, 0) // context
    assert all(len(record) == context + 1 for record in padded)
    np.testing.assert_array_equal(dropped, padded[: len(dropped)])


def test_each_heldout_token_is_predicted_exactly_once(config):
    rows = records(build_dataset(config, 16), "heldout")
    expected = stream(config, "heldout")
    targets = rows[:, 1:].ravel()
    np.testing.assert_array_equal(targets[: len(expected) - 1], expected[1:])
    bos = load_tokenizer(config.tokenizer).bos
    assert (targets[len(expected) - 1 :] == bos).all()
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


def test_train_records_are_the_stream_without_its_last_partial_record(config):
    rows = records(build_dataset(config, 16), "train")
    expected = stream(config, "train")
    assert len(rows) == (len(expected) - 1) // 16
    np.testing.assert_array_equal(rows[:, 1:].ravel(), expected[1 : 1 + rows[:, 1:].size])


def test_metadata_counts_the_documents_tokens_and_bytes(config):
    info = open_dataset(build_dataset(config, 16)).info
    tokenizer = load_tokenizer(config.tokenizer)
    for split in ("train", "heldout"):
        texts = list(documents(config.source, split, heldout=config.heldout))
        assert info.metadata[split] == {
            "documents": len(texts),
            "tokens": len(stream(config, split)),
            "bytes": sum(len(text.encode()) for text in texts),
        }
    assert info.metadata["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert info.metadata["context"] == 16 and info.metadata["tokenizer"] == "sotu-4096"
    assert info.features["tokens"].np_dtype == np.uint16


def test_progress_reports_the_final_totals_and_nothing_is_printed(config, capfd):
    seen = []
    path = build_dataset(config, 16, progress=seen.append)
    metadata = open_dataset(path).info.metadata
    both = [metadata["train"], metadata["heldout"]]
    last = seen[-1]
    assert last.documents == sum(split["documents"] for split in both)
    assert last.tokens == sum(split["tokens"] for split in both)
    assert last.bytes == last.of_bytes and last.shards == last.of_shards == 1
    assert seen == sorted(seen)
    assert capfd.readouterr() == ("", "")


def test_a_complete_build_is_reused(config):
    path = build_dataset(config, 16)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert build_dataset(config, 16, progress=pytest.fail) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_whatever_decides_the_records_decides_the_folder(config):
    paths = [build_dataset(config, 16), build_dataset(config, 17)]
    for change in ({"heldout": 0.4}, {"tokenizer": "gpt2"}):
        paths.append(build_dataset(config.model_copy(update=change), 16))
    with open(os.path.join(config.source, "00.txt"), "a") as file:
        file.write("more")
    paths.append(build_dataset(config, 16))
    assert len(set(paths)) == 5
    assert build_dataset(config.model_copy(update={"shuffle_seed": 9}), 16) == paths[-1]
    assert paths[0].name.startswith("texts-sotu-4096-16-")


def test_too_long_a_context_is_said_with_the_split_and_leaves_nothing(config):
    tokens = len(stream(config, "train"))
    message = rf"train.context = 9999 is longer than the data allows \({tokens} tokens in the train"
    with pytest.raises(LrkvError, match=message):
        build_dataset(config, 9999)
    assert os.listdir(config.directory) == []
    build_dataset(config, tokens - 1)


def test_an_unreadable_document_leaves_nothing(config):
    with open(os.path.join(config.source, "99.txt"), "wb") as file:
        file.write(b"\xff")
    with pytest.raises(LrkvError, match="99.txt"):
        build_dataset(config, 16)
    assert os.listdir(config.directory) == []


def test_a_missing_shard_is_named(config):
    path = build_dataset(config, 16)
    shard = next(path.glob("*train*"))
    shard.unlink()
    with pytest.raises(LrkvError, match=rf"{shard.name} is missing: delete .* built again"):
        build_dataset(config, 16)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "metadata.json"])
def test_a_cut_description_is_named(config, name):
    path = build_dataset(config, 16)
    text = (path / name).read_text()
    (path / name).write_text(text[: len(text) // 2])
    with pytest.raises(LrkvError, match=f"{path.name} is damaged .*: delete it"):
        build_dataset(config, 16)


def test_an_unwritable_directory_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    blocked = config.model_copy(update={"directory": str(tmp_path / "file")})
    with pytest.raises(LrkvError, match="data.directory = .*file cannot be written"):
        build_dataset(blocked, 16)


def test_a_build_that_another_process_finished_first_is_taken(config, monkeypatch):
    real = writing.describe
    depth = []

    def overtaken(*arguments, **options):
        real(*arguments, **options)
        if not depth:
            depth.append(1)
            build_dataset(config, 16)

    monkeypatch.setattr(writing, "describe", overtaken)
    path = build_dataset(config, 16)
    assert len(records(path, "train")) and os.listdir(config.directory) == [path.name]


KILLED = """
import sys, time
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.builder import build_dataset
def wait(done):
    if done.packed:
        print("started", flush=True)
        time.sleep(60)
build_dataset(DataConfig.model_validate_json(sys.argv[1]), 16, progress=wait)
"""


def test_a_killed_build_is_not_taken_for_complete_and_is_cleaned_up(config):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, config.model_dump_json()], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = os.listdir(config.directory)
    assert left.startswith(".building-")
    started = time.time()
    path = build_dataset(config, 16)
    assert os.listdir(config.directory) == [path.name]
    assert path.stat().st_mtime >= started - 1
    assert len(records(path, "train")) == (len(stream(config, "train")) - 1) // 16


def test_a_large_vocabulary_is_stored_in_int32(config, monkeypatch):
    class Large:
        vocabulary, name, fingerprint, bos = 70_000, "large", "f", 69_999
        token_bytes = np.ones(70_000, np.int32)

        def encode_batch(self, texts):
            return [np.full(len(text), 69_000) for text in texts]

    monkeypatch.setattr(builder_module, "load_tokenizer", lambda name: Large())
    row = open_dataset(build_dataset(config, 8)).as_data_source("train")[0]["tokens"]
    assert row.tolist() == [69_999] + [69_000] * 8
