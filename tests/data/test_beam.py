"""`lrkv data build --beam` writes the bytes of one process's build; in its stage alone."""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import pytest
from support import fineweb

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.jobs import beam_jobs
from lrkv_jax.data.records.streams import write_stream
from lrkv_jax.errors import LrkvError

pytestmark = [
    pytest.mark.beam,
    pytest.mark.skipif(
        importlib.util.find_spec("apache_beam") is None,
        reason="apache_beam is not installed: pip install -e '.[beam]'",
    ),
]

# The command itself, with a shard to each file of the source, and small files of records.
COMMAND = """
from lrkv_jax.cli import entry
from lrkv_jax.data.records import build, streams
build.SHARD_BYTES, streams.FILE_BYTES = 0, 1 << 20
entry()
"""
DIRECT = "--runner=DirectRunner --direct_running_mode=multi_processing --direct_num_workers=2"


def built(source, directory, *options):
    """The content of every file of the built folder, hidden ones too, by name."""
    words = [
        "data", "build", "nano", f"data.source={source}", "data.hub=null", "data.license=CC0-1.0",
        "data.tokenizer=sotu-4096", "data.heldout_shards=1", "train.seq_len=64",
        f"data.directory={directory}", *options,
    ]  # fmt: skip
    subprocess.run([sys.executable, "-c", COMMAND, *words], timeout=150, check=True)
    (folder,) = directory.glob("texts-*")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_direct_runner_of_two_processes_builds_what_one_process_builds(tmp_path):
    fineweb.make(tmp_path / "texts", files=5, rows=700)
    source = tmp_path / "texts"
    expected = built(source, tmp_path / "whole", "data.workers=1")
    assert len(expected) > 6
    assert built(source, tmp_path / "beam", "--beam", "--beam-options", DIRECT) == expected


def test_a_broken_file_and_an_unknown_runner_are_named_in_one_line(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    config = DataConfig(source=str(tmp_path), directory=str(tmp_path / "built"))
    target = tmp_path / "built/streams/broken"
    broken = partial(write_stream, config, [["broken.parquet", 0, ""]], target)
    for options, job, message in (
        (DIRECT, broken, r"broken.parquet is not readable parquet .*again$"),
        ("--runner=FlinkRuner", partial(os.getpid), "Unexpected pipeline runner: FlinkRuner"),
    ):
        with pytest.raises(LrkvError, match=message):
            list(beam_jobs(options.split())([job], 1))
