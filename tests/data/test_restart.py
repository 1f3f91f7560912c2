"""Promises of a build in stages: the same bits whoever did what and how often it was killed."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import fineweb
import numpy as np
import pyarrow.parquet as pq
import pytest

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records import packing
from lrkv_jax.data.records.builder import build_dataset, open_dataset
from lrkv_jax.data.sources import documents
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError

BUILD = """
import sys
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records import packing, staging
from lrkv_jax.data.records.builder import build_dataset
packing.FILE_BYTES = int(sys.argv[2])
staging._SHARD_BYTES = 0
if __name__ == "__main__":
    build_dataset(DataConfig.model_validate_json(sys.argv[1]), 64)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    fineweb.make(folder, files=3, rows=40)
    return folder


def settings(source, directory, **options):
    options = {"heldout_shards": 1, "workers": 1} | options
    return DataConfig(source=str(source), directory=str(directory), **options)


def content(path):
    """Every file of a built folder, by name."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def build(config, file_bytes=1 << 28):
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, config.model_dump_json(), str(file_bytes)],
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def staged(shards, tmp_path_factory):
    """The settings of a build by one process a stage, and where it is."""
    config = settings(shards, tmp_path_factory.mktemp("staged"))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lrkv_jax.data.records.staging._SHARD_BYTES", 0)
        yield config, build_dataset(config, 64, progress=seen.append), seen


def test_stages_make_what_is_made_at_once(shards, staged, tmp_path):
    at_once = build_dataset(settings(shards, tmp_path, workers=None), 64)
    assert content(at_once) == content(staged[1])
    assert os.listdir(tmp_path) == [at_once.name]


def test_another_context_is_packed_from_the_streams_that_are_there(staged, monkeypatch):
    config, _, _ = staged
    monkeypatch.setattr("lrkv_jax.data.records.pool._start", pytest.fail)
    path = build_dataset(config, 100)
    streams = sorted(os.listdir(os.path.join(config.directory, "streams")))
    assert [name.split("-")[0] for name in streams] == [f"00{n}_00000.parquet" for n in range(3)]
    # Across the files of the split, every token but the first is a target once.
    tokenizer = load_tokenizer(config.tokenizer)
    for split in ("train", "heldout"):
        expected = []
        for text in documents(config.source, split, heldout_shards=1):
            expected += [tokenizer.bos, *tokenizer.encode(text)]
        source = open_dataset(path).as_data_source(split)
        targets = np.concatenate([source[i]["tokens"][1:] for i in range(len(source))])
        length = min(len(targets), len(expected) - 1)
        np.testing.assert_array_equal(targets[:length], expected[1 : length + 1])
        assert abs(len(targets) - (len(expected) - 1)) < 100


def test_the_last_files_are_held_out_and_each_is_accounted_for(shards, staged):
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
        sums = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
        assert file["sha256"] == sums.stdout.split()[0]
    for split in ("train", "heldout"):
        total = {key: sum(file[split][key] for file in files) for key in metadata[split]}
        assert metadata[split] == total


def test_progress_of_several_processes_ends_at_the_totals(staged):
    _, path, seen = staged
    metadata, last = open_dataset(path).info.metadata, seen[-1]
    for key in ("documents", "tokens"):
        assert getattr(last, key) == sum(metadata[s][key] for s in ("train", "heldout"))
    assert last.shards == last.of_shards == 3 and last.bytes == last.of_bytes


def test_a_broken_row_group_is_named_and_finished_shards_stay(shards, tmp_path, monkeypatch):
    monkeypatch.setattr("lrkv_jax.data.records.staging._SHARD_BYTES", 0)
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
    assert [n.split("-")[0] for n in os.listdir(tmp_path / "built")] == ["streams"]
    (stays,) = os.listdir(tmp_path / "built" / "streams")
    assert stays.startswith("000_00000.parquet-")


def test_all_files_held_out_are_refused(shards, tmp_path):
    with pytest.raises(LrkvError, match="heldout_shards = 3 holds out all .* .3 of them"):
        build_dataset(settings(shards, tmp_path, heldout_shards=3), 64)


def test_a_full_disk_is_told_and_the_next_build_goes_on(shards, tmp_path):
    config = settings(shards, tmp_path, workers=None)
    code = BUILD.replace("import sys", "import resource, signal, sys").replace(
        "if __name__",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\nif __name__",
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, config.model_dump_json(), "99999999"],
        capture_output=True,
        text=True,
    )
    assert "LrkvError: data.directory" in ended.stderr and "cannot be written" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_files_are_divided_without_a_gap(monkeypatch):
    monkeypatch.setattr(packing, "FILE_BYTES", 1000)
    pieces = packing.pieces(100_001, 9, padded=True, vocabulary=4096)
    assert pieces[0].first == 0 and pieces[-1].last == -(-100_000 // 9) and len(pieces) > 200
    assert all(a.last == b.first for a, b in zip(pieces, pieces[1:], strict=False))


@pytest.mark.slow
def test_killed_at_random_and_resumed_it_is_the_same_to_the_bit(tmp_path):
    """LRKV_TEST_MEGABYTES=70 does it with 64 MB of parquet: two minutes."""
    megabytes = int(os.environ.get("LRKV_TEST_MEGABYTES", "12"))
    source = tmp_path / "source"
    fineweb.make(source, files=6, rows=megabytes * 75, groups=4)
    options = {"tokenizer": "gpt2"}
    whole = build(settings(source, tmp_path / "whole", workers=1, **options), 1 << 21)
    assert whole.wait() == 0
    draw = random.Random(0)
    streams = tmp_path / "killed" / "streams"

    def there():
        names = os.listdir(streams) if streams.is_dir() else []
        return sorted(name for name in names if not name.startswith("."))

    kills, finished = 0, []
    for attempt in range(8):
        config = settings(source, tmp_path / "killed", workers=1 + attempt % 3, **options)
        process = build(config, 1 << 21)
        # From while it starts, over each number of finished shards, to while it packs.
        while len(there()) < min(attempt, 6) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        kills += process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        finished.append(there())
    config = settings(source, tmp_path / "killed", workers=2, **options)
    assert build(config, 1 << 21).wait() == 0
    assert kills >= 5
    # What was finished at one kill was there at the next.
    assert all(set(a) <= set(b) for a, b in zip(finished, finished[1:], strict=False))
    (expected,) = (p for p in (tmp_path / "whole").iterdir() if p.name != "streams")
    (found,) = (p for p in (tmp_path / "killed").iterdir() if p.name != "streams")
    assert content(found) == content(expected) and len(content(found)) > 6
    assert not [name for name in os.listdir(streams) if name.startswith(".")]
    files = json.loads(content(found)["metadata.json"])["files"]
    assert len(files) == 6
    size = sum(file["size"] for file in files)
    print(f"{kills} kills, {size:,} bytes, shards finished: {[len(f) for f in finished]}")
