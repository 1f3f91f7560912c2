"""`lrkv data build --beam` writes the bytes of one process's build, whatever dies on the way."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from support import fineweb

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.jobs import beam_jobs
from lrkv_jax.data.records.streams import write_stream
from lrkv_jax.errors import LrkvError

pytestmark = pytest.mark.beam

# The command itself, with a shard to each file of the source, and small files of records.
COMMAND = """
from lrkv_jax.cli import entry
from lrkv_jax.data.records import build, streams
build.SHARD_BYTES, streams.FILE_BYTES = 0, 1 << 20
entry()
"""
DIRECT = "--runner=DirectRunner --direct_running_mode=multi_processing --direct_num_workers=2"
FILES = 5
LIMIT = 150  # seconds


def start(source, directory, beam=None):
    words = [
        "data", "build", "nano", f"data.source={source}", "data.hub=null", "data.license=CC0-1.0",
        "data.tokenizer=sotu-4096", "data.heldout_shards=1", "train.seq_len=64",
        f"data.directory={directory}",
    ]  # fmt: skip
    words += ["data.workers=1"] if beam is None else ["--beam", "--beam-options", beam]
    log = directory.with_suffix(".log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], stdout=log, stderr=log, start_new_session=True
    )


def finish(process, directory):
    """The content of every file of the built folder, hidden ones too, by name."""
    code = process.wait(LIMIT)
    assert code == 0, directory.with_suffix(".log").read_text()[-4000:]
    (built,) = (path for path in directory.iterdir() if path.name != "streams")
    return {path.name: path.read_bytes() for path in built.iterdir()}


def until(process, found):
    """What `found` finds, as soon as it does; the build must not have ended before."""
    ends = time.monotonic() + LIMIT
    while not (result := found()):
        assert process.poll() is None, "the build was over before it could be disturbed"
        assert time.monotonic() < ends
        time.sleep(0.005)
    return result


def streams_of(directory):
    """(finished, process ids of those who write one) of the build's streams."""
    names = os.listdir(directory / "streams") if (directory / "streams").is_dir() else []
    writing = [int(name.split(".")[-2]) for name in names if name.startswith(".building-")]
    return [name for name in names if not name.startswith(".")], writing


def kill(process):
    """Kill a build and all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "texts"
    fineweb.make(folder, files=FILES, rows=700)
    return folder


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """What one process builds."""
    directory = tmp_path_factory.mktemp("whole") / "built"
    directory.mkdir()
    content = finish(start(source, directory), directory)
    assert len(content) > 6
    return content


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "built").mkdir()
    return tmp_path / "built"


def test_direct_runner_of_two_processes_killed_and_started_again(source, expected, directory):
    process = start(source, directory, DIRECT)
    until(process, lambda: len(streams_of(directory)[0]) >= 1)
    kill(process)
    kept = set(streams_of(directory)[0])
    assert 1 <= len(kept) < FILES
    before = {name: (directory / "streams" / name).stat().st_mtime_ns for name in kept}
    assert finish(start(source, directory, DIRECT), directory) == expected
    after = {name: (directory / "streams" / name).stat().st_mtime_ns for name in kept}
    assert after == before
    assert len(streams_of(directory)[0]) == FILES and not streams_of(directory)[1]


def test_a_broken_file_and_an_unknown_runner_are_named_in_one_line(directory):
    source = directory.parent / "texts"
    source.mkdir()
    (source / "broken.parquet").write_bytes(b"no parquet")
    config = DataConfig(source=str(source), directory=str(directory))
    broken = partial(write_stream, config, ["broken.parquet"], directory / "streams" / "broken")
    for options, job, message in (
        (DIRECT, broken, r"broken.parquet is not readable parquet .*again$"),
        ("--runner=FlinkRuner", partial(os.getpid), "Unexpected pipeline runner: FlinkRuner"),
    ):
        with pytest.raises(LrkvError, match=message):
            list(beam_jobs(options.split())([job], 1))
