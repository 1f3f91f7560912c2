"""Promises of a build: every token a target once, whole or not at all, and always the same bits.

Whatever was killed, on however many processes, and as earlier versions of this package built them.
"""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import fineweb

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.loader import Records
from lrkv_jax.data.records import build as build_module
from lrkv_jax.data.records import streams
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.records.folders import appearing, open_dataset, remove_abandoned
from lrkv_jax.data.records.jobs import run_here, run_jobs
from lrkv_jax.data.sources import documents, file_names
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError

TOKENIZER = load_tokenizer("sotu-4096")
SPLITS = ("train", "heldout")


def records(path, split):
    source = open_dataset(path).as_data_source(split)
    return np.stack([source[i]["tokens"] for i in range(len(source))])


def stream(config, split):
    """The split's tokens made by hand; of whole files, the last one is held out."""
    texts = list(documents(config.source, split, heldout=config.heldout))
    if config.heldout_shards:
        names = sorted(os.listdir(config.source))
        tables = [pq.read_table(Path(config.source, name)) for name in names]
        parts = {"train": tables[:-1], "heldout": tables[-1:]}[split]
        texts = [text for table in parts for text in table["text"].to_pylist()]
    ids = []
    for text in texts:
        ids += [TOKENIZER.bos, *TOKENIZER.encode(text)]
    return np.array(ids)


def content(path):
    """Every file of a built folder, by name."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


# --- a small build: sixty short documents in a folder, about a third of them held out


def make_config(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n:02}.txt").write_text(f"Document {n} says: " + "and so on, " * (n % 7))
    return DataConfig(source=str(folder), heldout=0.3, directory=str(tmp_path / "built"))


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(settings, folder, progress) of a build that nobody may change."""
    config, seen = make_config(tmp_path_factory.mktemp("small")), []
    return config, build_dataset(config, 16, progress=lambda *done: seen.append(done)), seen


def test_a_build_has_every_token_and_its_manifest_counts_them(built):
    config, path, seen = built
    info = open_dataset(path).info
    for split in SPLITS:
        texts = list(documents(config.source, split, heldout=config.heldout))
        assert info.metadata[split] == {
            "documents": len(texts),
            "tokens": len(stream(config, split)),
            "bytes": sum(len(text.encode()) for text in texts),
        }
    assert info.metadata["tokenizer_fingerprint"] == TOKENIZER.fingerprint
    assert info.metadata["context"] == 16 and info.metadata["tokenizer"] == "sotu-4096"
    assert info.features["tokens"].np_dtype == np.uint16
    for name in ("bytes read", "tokens packed"):
        progress = [(done, of) for what, done, of in seen if what == name]
        assert progress == sorted(progress) and progress[-1][0] == progress[-1][1] > 0
    # Each held-out token is predicted once, and training loses its last partial record.
    rows, expected = records(path, "heldout"), stream(config, "heldout")
    targets = rows[:, 1:].ravel()
    np.testing.assert_array_equal(targets[: len(expected) - 1], expected[1:])
    assert (targets[len(expected) - 1 :] == TOKENIZER.bos).all()
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
    rows, expected = records(path, "train"), stream(config, "train")
    assert len(rows) == (len(expected) - 1) // 16
    np.testing.assert_array_equal(rows[:, 1:].ravel(), expected[1 : 1 + rows[:, 1:].size])


def test_a_complete_build_is_reused_and_nothing_is_printed(built, capfd):
    config, path, _ = built
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert build_dataset(config, 16, progress=pytest.fail) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert capfd.readouterr() == ("", "")


def test_the_embedded_corpus_keeps_its_name_and_its_bytes(data_directory):
    """Folders that an earlier version of this package has built are found and read."""
    path = build_dataset(DataConfig(directory=str(data_directory)), 256)
    assert path.name == "sotu-sotu-4096-256-a177cf42ef"
    digest = hashlib.sha256()
    for split in SPLITS:
        rows = Records(path, split)
        digest.update(rows.read(range(len(rows))).astype("<u2").tobytes())
    assert digest.hexdigest()[:16] == "22b93f7ea916cba2"
    # It is one file: its documents are held out, also where a configuration holds out files.
    whole = build_dataset(DataConfig(directory=str(data_directory), heldout_shards=1), 256)
    assert [len(Records(whole, s)) for s in SPLITS] == [len(Records(path, s)) for s in SPLITS]


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


def test_records_belong_to_a_content_wherever_its_text_lies(config, tmp_path, monkeypatch):
    def found(config):
        return build_dataset(config, 16, progress=pytest.fail)

    monkeypatch.setattr(hashlib, "file_digest", summed := Mock(side_effect=hashlib.file_digest))
    path = build_dataset(config, 16)
    assert summed.call_count == 60  # each file once
    (stream_folder,) = (tmp_path / "built/streams").iterdir()
    for file in Path(config.source).iterdir():
        os.utime(file, ns=(10**18, 10**18))
    copy = shutil.copytree(config.source, tmp_path / "copy/texts", copy_function=shutil.copyfile)
    elsewhere = config.model_copy(update={"source": str(copy)})
    assert found(config) == found(elsewhere) == path
    # An edit that keeps the size, and a copy without the text.
    page = copy / "06.txt"
    page.write_text(page.read_text().swapcase())
    edited = build_dataset(elsewhere, 16)
    alone = tmp_path / "alone"
    shutil.copytree(edited, alone / edited.name)
    shutil.rmtree(copy)
    without, lines = elsewhere.model_copy(update={"directory": str(alone)}), []
    copied = alone / edited.name
    assert build_dataset(without, 16, progress=pytest.fail, warn=lines.append) == copied
    assert lines == [f"data.source = {copy} is not there: the records {copied} are used"]
    for unclear in ({}, {"directory": str(alone), "heldout": 0.4}):
        with pytest.raises(LrkvError, match="texts does not exist"):
            found(elsewhere.model_copy(update=unclear))
    # What earlier versions have built, by the files' times.
    stream_folder.rename(stream_folder.with_name("00.txt-b7ad5631a8a4"))
    build_dataset(config, 17)
    assert not stream_folder.exists()
    earlier = path.rename(path.with_name("texts-sotu-4096-16-021231a45f"))
    assert found(config) == earlier


def test_what_cannot_be_built_is_named_and_leaves_nothing(config, tmp_path, monkeypatch):
    tokens = len(stream(config, "train"))
    message = rf"train.seq_len = 9999 is longer than the data allows \({tokens} tokens in the train"
    with pytest.raises(LrkvError, match=message):
        build_dataset(config, 9999)
    Path(config.source, "99.txt").write_bytes(b"\xff")
    with pytest.raises(LrkvError, match="99.txt"):
        build_dataset(config, 16)
    assert sorted(os.listdir(config.directory)) == ["sources.json", "streams"]

    def vanishing(source):
        names = file_names(source)
        Path(source, names[-1]).unlink()
        return names

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "file_names", vanishing)
        with pytest.raises(LrkvError, match=r"99.txt cannot be read \(No such file"):
            build_dataset(config, 16)
    (tmp_path / "file").write_text("")
    for directory in (str(tmp_path / "file"), "/dev/null", "x" * 5000, "a\0b"):
        with pytest.raises(LrkvError, match=r"data.directory = .* cannot be written"):
            build_dataset(config.model_copy(update={"directory": directory}), 16)


def with_fewer_rows(text):
    """A description whose training split has other numbers of rows."""
    about = json.loads(text)
    (train,) = (split for split in about["splits"] if split["name"] == "train")
    train["shardLengths"] = [str(int(n) - 1) for n in train["shardLengths"]]
    return json.dumps(about)


@pytest.mark.parametrize(
    ("pattern", "change", "message"),
    [
        ("*train*", None, "train.array_record-.* is missing: delete .* built again"),
        ("dataset_info.json", None, "is not a built dataset: delete"),
        ("dataset_info.json", lambda text: text[:99], "is damaged .*: delete it"),
        ("metadata.json", lambda text: "{}", "is damaged .*context.*: delete it"),
        ("dataset_info.json", with_fewer_rows, "has .* rows, dataset_info.json says .*: delete"),
    ],
)
def test_a_damaged_folder_is_named_with_its_mend(built, tmp_path, pattern, change, message):
    path = tmp_path / built[1].name
    shutil.copytree(built[1], path)
    (file,) = path.glob(pattern)
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text()))
    with pytest.raises(LrkvError, match=message) as caught:
        Records(path, "train")
    assert "\n" not in str(caught.value)


# --- builds in stages, by other processes, of three parquet files


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    fineweb.make(folder, files=3, rows=40)
    return folder


def settings(source, directory, **options):
    how = {"heldout_shards": 1, "workers": 1, **options}
    return DataConfig(source=str(source), directory=str(directory), **how)


@pytest.fixture(scope="module")
def staged(shards, tmp_path_factory):
    """The settings of a build by another process, and where it is."""
    config = settings(shards, tmp_path_factory.mktemp("staged"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "SHARD_BYTES", 0)
        yield config, build_dataset(config, 64)


def test_another_context_is_packed_from_the_streams_that_are_there(staged, monkeypatch):
    config, _ = staged
    monkeypatch.setattr(streams, "_tokenize_file", pytest.fail)
    monkeypatch.setattr(build_module, "run_jobs", run_here)
    path = build_dataset(config, 100)
    kept = sorted(os.listdir(os.path.join(config.directory, "streams")))
    assert [name.split("-")[0] for name in kept] == [f"00{n}_00000.parquet" for n in range(3)]
    # Across the files of the split, every token but the first is a target once.
    for split in SPLITS:
        expected, targets = stream(config, split), records(path, split)[:, 1:].ravel()
        length = min(len(targets), len(expected) - 1)
        np.testing.assert_array_equal(targets[:length], expected[1 : length + 1])
        assert abs(len(targets) - (len(expected) - 1)) < 100


def test_stages_make_what_is_made_at_once_and_account_for_each_file(shards, staged, tmp_path):
    at_once = build_dataset(settings(shards, tmp_path, workers=None), 64)
    assert content(at_once) == content(staged[1])
    metadata = open_dataset(staged[1]).info.metadata
    files = metadata["files"]
    assert [file["name"] for file in files] == [f"00{n}_00000.parquet" for n in range(3)]
    for number, file in enumerate(files):
        path = shards / file["name"]
        texts = pq.read_table(path, columns=["text"])["text"].to_pylist()
        own, other = ("heldout", "train") if number == 2 else ("train", "heldout")
        assert file["rows"] == file[own]["documents"] == len(texts) and file[other]["tokens"] == 0
        assert file[own]["bytes"] == sum(len(text.encode()) for text in texts)
        assert file["size"] == path.stat().st_size
        assert file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for split in SPLITS:
        total = {key: sum(file[split][key] for file in files) for key in metadata[split]}
        assert metadata[split] == total
    with pytest.raises(LrkvError, match="heldout_shards = 3 holds out all .* .3 of them"):
        build_dataset(settings(shards, tmp_path, heldout_shards=3), 64)


def test_a_broken_row_group_is_named_and_finished_shards_stay(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "SHARD_BYTES", 0)
    source = tmp_path / "source"
    shutil.copytree(shards, source)
    broken = source / "001_00000.parquet"
    group = pq.ParquetFile(broken).metadata.row_group(1).column(0)
    whole = broken.read_bytes()
    start = group.data_page_offset
    broken.write_bytes(whole[:start] + b"\xff" * 4000 + whole[start + 4000 :])
    config = settings(source, tmp_path / "built")
    with pytest.raises(LrkvError, match="001_00000.parquet is not .*row group 1 of 3"):
        build_dataset(config, 64)
    assert sorted(os.listdir(tmp_path / "built")) == ["sources.json", "streams"]
    stay = {name[:3] for name in os.listdir(tmp_path / "built" / "streams")}
    assert "000" in stay and "001" not in stay


def test_a_full_disk_is_named_and_leaves_nothing_half_written(shards, tmp_path):
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(LrkvError, match="data.directory = .* cannot be written"):
            build_dataset(settings(shards, tmp_path, workers=None), 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(os.listdir(tmp_path)) == ["sources.json", "streams"]
    assert os.listdir(tmp_path / "streams") == []


BUILD = """
import sys
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records import build, streams
streams.FILE_BYTES, build.SHARD_BYTES = int(sys.argv[2]), 0
build.build_dataset(DataConfig.model_validate_json(sys.argv[1]), 64)
"""


def test_a_killed_worker_and_a_cut_stream_are_named(staged, tmp_path):
    with pytest.raises(LrkvError, match="process .* was killed or did not start: .* __name__"):
        list(run_jobs([partial(os.abort)], 1))
    shutil.copytree(Path(staged[0].directory) / "streams", tmp_path / "streams")
    (folder,) = (tmp_path / "streams").glob("000_*")
    os.truncate(folder / "train.bin", 100)
    with pytest.raises(LrkvError, match="000_00000.* is damaged: delete it"):
        streams.Stream([(folder, "train")], 4096)


def test_what_a_killed_process_of_the_same_number_left_is_removed(tmp_path):
    """A container's first process is number 1 in each, and pods of a Job have one host name."""
    here, target = f"{socket.gethostname()}.{os.getpid()}", tmp_path / "records"
    killed, other = (
        tmp_path / f".building-records.{name}.00000000.12345678" for name in (here, "elsewhere.7")
    )
    killed.mkdir()
    other.mkdir()
    with appearing(target) as scratch:
        assert not killed.exists() and other.exists()
        remove_abandoned(target)
        assert scratch.is_dir(), "it is in use"
    assert target.is_dir() and not scratch.exists()


def test_more_streams_are_joined_than_files_may_be_open(staged):
    (folder,) = (Path(staged[0].directory) / "streams").glob("000_*")
    alone = streams.Stream([(folder, "train")], 4096)
    expected = np.tile(alone.read(0, len(alone)), 99)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 9, limits[1]))
    try:
        joined = streams.Stream([(folder, "train")] * 99, 4096)
        pieces = [
            joined.read(at, min(at + 5000, len(joined))) for at in range(0, len(joined), 5000)
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


@pytest.mark.slow
def test_killed_at_random_and_resumed_it_is_the_same_to_the_bit(tmp_path):
    """LRKV_TEST_MEGABYTES=70 does it with 64 MB of parquet: two minutes."""
    megabytes = int(os.environ.get("LRKV_TEST_MEGABYTES", "4"))
    source = tmp_path / "source"
    fineweb.make(source, files=3, rows=megabytes * 150, groups=4)

    def start(directory, workers):
        config = settings(source, tmp_path / directory, workers=workers, tokenizer="gpt2")
        command = [sys.executable, "-c", BUILD, config.model_dump_json(), str(1 << 18)]
        return subprocess.Popen(command, start_new_session=True)

    assert start("whole", 1).wait() == 0
    draw = random.Random(0)
    kept = tmp_path / "killed" / "streams"

    def there():
        names = os.listdir(kept) if kept.is_dir() else []
        return sorted(name for name in names if not name.startswith("."))

    kills, finished = 0, []
    for attempt in range(5):
        process = start("killed", 1 + attempt % 2)
        # From while it starts, over each number of finished shards, to while it packs.
        while len(there()) < min(attempt, 3) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        kills += process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        finished.append(there())
    assert start("killed", 2).wait() == 0
    assert kills >= 3
    # What was finished at one kill was there at the next.
    assert all(set(a) <= set(b) for a, b in zip(finished, finished[1:], strict=False))
    (expected,) = (tmp_path / "whole").glob("source-*")
    (found,) = (tmp_path / "killed").glob("source-*")
    assert content(found) == content(expected) and len(content(found)) > 6
    assert not [name for name in os.listdir(kept) if name.startswith(".")]
    assert len(json.loads(content(found)["metadata.json"])["files"]) == 3
