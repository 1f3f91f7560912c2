"""`lrkv runs`, `compare`, `show` and `data show` say what is there."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.command import lrkv
from support.written_runs import write_run

from lrkv_jax.lab.overview import cost, next_commands
from lrkv_jax.lab.report.comparison.files import archive_runs, read_runs


@pytest.fixture
def two(tmp_path):
    """Two written runs, the second of which was stopped."""
    finished = write_run(tmp_path / "runs" / "one", heldout=(9000, 9000))
    stopped = write_run(tmp_path / "runs" / "two", "attention=mha", "train.seed=3", until=30)
    return finished, stopped


def test_runs_are_listed_with_their_state(capsys, monkeypatch, two):
    finished, stopped = two
    write_run(finished.parent / "swept" / "one", "attention=mqa")  # as a sweep does
    code, out, _ = lrkv(capsys, monkeypatch, "runs", str(finished.parent), "--json")
    rows = {os.path.relpath(row["run"], finished.parent): row for row in json.loads(out)}
    assert code == 0 and [rows[name]["state"] for name in ("one", "two")] == ["finished", "stopped"]
    assert rows["two"]["step"] < rows["two"]["steps"] == rows["one"]["step"]
    assert rows["one"]["bytes"] == sum(path.stat().st_size for path in finished.iterdir())
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    hold += "; print(flush=True); sys.stdin.read()"
    other = [sys.executable, "-c", hold, str(stopped / "lock")]
    (stopped / "checkpoint").symlink_to("deleted")  # once it was listed
    real = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.is_symlink() or real(path))
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        _, out, _ = lrkv(capsys, monkeypatch, "runs", str(finished.parent))
        trainer.stdin.close()
    lines = [line.split() for line in out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["two", "swept/one", "one"]  # MHA comes first
    assert lines[0][3] == "training"
    archive_runs(read_runs([finished]), archive := finished.parent.parent / "archive.jsonl")
    _, out, _ = lrkv(capsys, monkeypatch, "runs", str(archive), "--json")
    (row,) = json.loads(out)
    assert (row["step"], row["state"], row["bytes"]) == (40, "finished", None)
    code, _, err = lrkv(capsys, monkeypatch, "analyze", str(archive))
    assert code == 2 and "archived, without weights" in err


def test_a_run_of_a_model_alone_is_not_to_be_trained(two):
    _, stopped = two
    (stopped / "metrics.jsonl").unlink()
    (run,) = read_runs([stopped])
    assert next_commands(run)[0].startswith("lrkv train ")
    (stopped / "checkpoints/0").mkdir(parents=True)
    verbs = [command.split()[1] for command in next_commands(run)]
    assert verbs == ["evaluate", "generate", "serve"]


def test_device_hours_are_those_of_each_start(two):
    start = {"event": "start", "time": "2026-01-01", "device": "a", "cores": 1, "dtype": "float32"}
    starts = [start | {"step": 0, "devices": 8}, start | {"step": 20, "devices": 1}]
    (run,) = read_runs([two[0]])
    for row in run.rows:  # 40, an hour of each start
        row["seconds"] = 180
    for history, hours in ((starts, "9"), ([start | {"step": 0}, starts[1]], None)):
        assert dict(cost(replace(run, history=history))).get("device-hours") == hours


def test_two_runs_are_compared_by_settings_results_and_curves(capsys, monkeypatch, tmp_path, two):
    where = "--out", str(tmp_path / "out")
    code, out, _ = lrkv(capsys, monkeypatch, "compare", *map(str, two), *where)
    assert code == 0 and "train.seed" in out and "MHA" in out
    assert (tmp_path / "out/compare.png").stat().st_size > 10_000
    code, _, err = lrkv(capsys, monkeypatch, "compare", str(two[0]), str(two[0].parent), *where)
    assert code == 2 and "hold 3 runs" in err


def test_a_configuration_is_shown_resolved_or_as_what_differs(capsys, monkeypatch, two):
    _, out, _ = lrkv(capsys, monkeypatch, "show", "quickstart", "attention=mla", "train.steps=7")
    assert "\nattention: mla\n" in out and "  steps: 7\n" in out
    diff = "show", "quickstart", "train.steps=7", "--diff", "quickstart"
    _, out, _ = lrkv(capsys, monkeypatch, *diff)
    assert [line.split() for line in out.splitlines()[2:]] == [["train.steps", "7", "200"]]
    _, out, _ = lrkv(capsys, monkeypatch, "show", str(two[0]), "--diff", str(two[0]))
    assert out == "no difference\n"


def test_data_are_counted_and_the_first_records_shown(capsys, monkeypatch, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("The people of the United States. " * 40)
    (texts / "b.txt").write_text("We have no question of the cost. " * 40)
    (texts / "notes.md").write_text("not read")
    (texts / ".cache").write_text("hidden")
    settings = (f"data.source={texts}", f"data.directory={tmp_path}", "data.heldout_shards=1")
    code, out, _ = lrkv(
        capsys, monkeypatch, "data", "show", "quickstart", *settings, "train.seq_len=16",
        "--records", "1",
    )  # fmt: skip
    assert code == 0 and "left out, for their names: notes.md" in out
    train = next(line.split() for line in out.splitlines() if line.startswith("train"))
    assert train[2] == "1" and train[4] == "1,320"
    assert "record 0:\nThe people of the United States." in out
    mixture = "data.mixture={folder: demo, loss: assistant, train: [{task: gsm8k, split: train}],"
    mixture += " heldout: [{task: gsm8k, split: test}]}"
    command = "data", "show", "quickstart", mixture, settings[1], "train.seq_len=64"
    code, out, _ = lrkv(capsys, monkeypatch, *command, "--records", "1")
    assert code == 0 and re.search("record 0:\n[A-Z][a-z]", out), out
