"""A sweep does each run once, goes on after anything, and lets no failure stop the others."""

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.command import lrkv
from support.served import wait_until
from support.several import FEW_OPTIMISATIONS
from support.tiny import TINY

from lrkv_jax.config import dump_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.sweep import work as sweep_work
from lrkv_jax.lab.sweep.display import Display
from lrkv_jax.lab.sweep.grid import grid
from lrkv_jax.lab.sweep.work import work
from lrkv_jax.training.metrics import read_metrics

NANO = "configs/nano.yaml"
STAND_IN = (sys.executable, "-S", str(Path(__file__).parents[2] / "support" / "stand_in.py"))


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_work, "LRKV", STAND_IN)
    monkeypatch.setenv("CONFIGS", str(tmp_path / "configs"))


def points_of(folder, *settings):
    """A sweep's points, whose configurations lie where the stand-in finds them."""
    points = grid(NANO, [*settings, "train.steps=5"], str(folder))
    (folder / "configs").mkdir(exist_ok=True)
    for point in points:
        (folder / "configs" / f"{point.name}.yaml").write_text(dump_config(point.config))
    return points


def run(points, folder, **how):
    outcomes = []
    how = {"tasks": ["bpb"], "logs": folder / "logs", "report": outcomes.append, **how}
    return work(points, **how), {outcome.point.name: outcome for outcome in outcomes}


def starts(points):
    return [len((p.directory / "starts").read_text().splitlines()) for p in points]


def test_done_runs_are_skipped_and_a_failure_stops_no_other(tmp_path, stand_in):
    points = points_of(tmp_path, "attention=mha,mqa,gqa")
    ended, first = run(points, tmp_path)
    assert ended and [first[p.name].state.name for p in points] == ["done", "begun", "done"]
    assert "no multi-query today" in first["mqa"].error and first["mha"].error is None
    assert "no multi-query today" in (tmp_path / "logs" / "mqa.log").read_text()
    run(points, tmp_path)
    assert starts(points) == [1, 2, 1]
    run(points, tmp_path, tasks=["bpb", "agreement"])  # trained, but not evaluated on both
    assert starts(points) == [2, 3, 2]


def test_a_sweep_shows_how_far_each_run_is_and_ends_in_a_table(tmp_path, stand_in, capsys):
    points = points_of(tmp_path, "attention=gqa,mqa,mha,lrkv")
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    with Display(points, screen) as display:
        run(points[:3], tmp_path, report=display.report)
        points[3].directory.mkdir()
        row = {"step": 2, "loss": 5.5, "seconds": 30.0}
        points[3].directory.joinpath("metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 2 + '{"s')
        display.watch(points[3])
    frame = [line.split() for line in screen.file.getvalue().rpartition("loss")[2].splitlines()]
    assert [["gqa", "done", "5/5", "2.1000"], ["mqa", "failed", "0/5"]] == frame[2:4]
    assert ["lrkv", "training", "2/5", "5.5000", "0:01:30"] == frame[5]
    display.print_results()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:4]] == [
        [str(tmp_path / "mha"), "2.0000"], [str(tmp_path / "gqa"), "2.1000"],
    ]  # fmt: skip
    assert rows[4] == ["next", "lrkv", "report", str(tmp_path)]
    assert rows[5][:2] == ["failed:", "mqa:"] and "no multi-query today" in " ".join(rows[5])


def test_archived_runs_are_done_without_their_directories(tmp_path, stand_in):
    points = points_of(tmp_path, "attention=mha,gqa", "seed=0,1")
    archive = tmp_path / "archive.jsonl"
    run(points[:2], tmp_path, archive=archive)
    for point in points[:2]:
        shutil.rmtree(point.directory)
    ended, outcomes = run(points, tmp_path, archive=archive)
    assert ended and {one.state.name for one in outcomes.values()} == {"done"}
    assert not points[0].directory.exists() and points[3].directory.exists()
    rows = [json.loads(line) for line in archive.read_text().splitlines()]
    assert [row["run"] for row in rows] == sorted(outcomes)
    run(points[2:], tmp_path, archive=archive, tasks=["bpb", "agreement"])  # evaluated on more
    asked = [json.loads(line)["evaluation"].keys() for line in archive.read_text().splitlines()]
    assert ["agreement" in one for one in asked] == [True, True, False, False]  # gqa's, mha's
    again = tmp_path / "again"
    points = grid(NANO, ["attention=mha", "seed=0,1", "train.steps=5,6"], str(again))
    # MHA's, which another grid names by their steps too.
    there = [point for point in points if point.config.train.steps == 5]
    assert {point.name for point in there}.isdisjoint(outcomes)
    _, found = run(there, again, archive=archive)
    assert {one.state.name for one in found.values()} == {"done"}
    assert not any(point.directory.exists() for point in there)
    other = points_of(tmp_path, "attention=mha,gqa", "seed=0,1", "train.global_batch_size=4")
    said = r"archive holds another run \(train.global_batch_size.*--archive FILE"
    with pytest.raises(LrkvError, match=said):
        run(other, tmp_path, archive=archive)


def test_a_task_or_archive_that_cannot_be_is_refused_before_anything_is_trained(tmp_path, stand_in):
    points = points_of(tmp_path, "attention=mha")
    for task, said in (
        ("nope", "unknown task nope: use bpb, docstrings, agreement, arc"),
        ("humaneval", "lrkv evaluate RUN --tasks humaneval --run-model-code"),
        ("mmlu", "has no ids for the chat"),
    ):
        with pytest.raises(LrkvError, match=said):
            run(points, tmp_path, tasks=["bpb", task])
    with pytest.raises(LrkvError, match="absent/a.jsonl cannot be written"):
        run(points, tmp_path, archive=tmp_path / "absent" / "a.jsonl")
    assert not points[0].directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_sweep_lets_its_run_save_and_goes_on_later(tmp_path, stand_in, number):
    """Also where a run before it has failed."""
    points = points_of(tmp_path, "attention=mqa,mla,mha")
    arguments = [NANO, "attention=mqa,mla,mha", "train.steps=5", "--out", str(tmp_path)]
    code = (
        "import sys; from lrkv_jax import cli; from lrkv_jax.lab.sweep import work; "
        f"work.LRKV = {STAND_IN!r}; "
        f"sys.argv = ['lrkv', 'sweep', *{arguments!r}, '--tasks', 'bpb']; cli.main()"
    )
    swept = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup ignores SIGHUP
    )  # fmt: skip
    mla = tmp_path / "mla"
    wait_until((mla / "waits").exists, 60)
    swept.send_signal(number)
    _, said = swept.communicate(timeout=60)
    assert swept.returncode == 75 and (mla / "stopped").exists(), said
    ended, outcomes = run(points, tmp_path)
    assert ended and outcomes.pop("mqa").error and len(outcomes) == 2
    assert all(outcome.state.name == "done" for outcome in outcomes.values())
    assert starts(points) == [2, 2, 1]


def test_a_run_that_was_stopped_alone_is_not_done_and_the_others_are(tmp_path, stand_in):
    points = points_of(tmp_path, "attention=mla,mha")

    def stop(point):
        if (point.directory / "waits").exists():
            (point.directory / "stop").touch()

    ended, outcomes = run(points, tmp_path, watch=stop)
    assert not ended and outcomes["mla"].error is None
    assert [outcomes[p.name].state.name for p in points] == ["begun", "done"]


@pytest.mark.slow
def test_a_swept_run_is_the_run_that_train_makes(tmp_path, pages, capsys, monkeypatch):
    """The real thing: the same command trains the same numbers."""
    settings = ["quickstart", "attention=mha,lrkv", *TINY, *pages]
    sweep = ["sweep", *settings, "--out", tmp_path / "all"]
    monkeypatch.setenv("XLA_FLAGS", FEW_OPTIMISATIONS)  # of the processes that these start
    code, *said = lrkv(capsys, monkeypatch, *sweep, "--tasks", "bpb")
    assert code == 0, said
    points = grid(settings[0], settings[1:], str(tmp_path / "all"))
    again = [sys.executable, "-m", "lrkv_jax.cli", "train", *points[1].arguments]
    alone = tmp_path / "alone"
    subprocess.run([*again, f"run_dir={alone}"], check=True)
    ours, theirs = (read_metrics(directory) for directory in (points[1].directory, alone))
    assert [row["loss"] for row in ours] == [row["loss"] for row in theirs]
    assert ours[-1]["validation_bpb"] == theirs[-1]["validation_bpb"]
    _, listed, _ = lrkv(capsys, monkeypatch, *sweep, "--tasks", "bpb", "--list")
    assert listed.count("done, ") == 2
