"""One process that is told to stop: at the end of its step, at the end of its time, or at once."""

import signal
import subprocess
import sys
import time

import pytest
from runs import ENVIRONMENT, command

from lrkv_jax.checkpoint.inspect import entries, verify
from lrkv_jax.train.metrics import read_metrics

pytestmark = pytest.mark.faults

LIMIT = 120
ENDLESS = ("train.steps=100000", "train.save_every=0")


def started(pages, run_dir, *more):
    arguments = ["-m", "lrkv_jax", *command(pages, run_dir, "attention=mha", *ENDLESS, *more)]
    return subprocess.Popen(
        [sys.executable, *arguments], env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_rows(run, run_dir, count=5):
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + LIMIT
    while not (metrics.is_file() and metrics.read_text().count("\n") >= count):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)


def test_sigterm_finishes_the_step_saves_and_says_start_me_again(pages, tmp_path):
    run_dir = tmp_path / "run"
    run = started(pages, run_dir)
    wait_for_rows(run, run_dir)
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, output + errors
    rows = read_metrics(run_dir)
    assert [(e.step, verify(e).damage) for e in entries(run_dir)] == [(rows[-1]["step"], None)]
    assert "the same command goes on" in output


def test_a_second_signal_leaves_the_last_checkpoint_as_it_was(pages, tmp_path):
    run_dir = tmp_path / "run"
    run = started(pages, run_dir, "train.save_every=3")
    wait_for_rows(run, run_dir, 8)
    run.send_signal(signal.SIGINT)
    time.sleep(0.6)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=LIMIT)
    # It came before all was saved, when all was, or while the process was leaving.
    assert run.returncode in (128 + signal.SIGINT, 75, -signal.SIGINT), errors
    assert all(verify(entry).damage is None for entry in entries(run_dir))
    assert entries(run_dir)


def test_the_end_of_the_time_saves_and_says_start_me_again(pages, tmp_path):
    run_dir = tmp_path / "run"
    run = started(pages, run_dir, "--time-limit", "00:09")
    output, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, output + errors
    last = read_metrics(run_dir)[-1]["step"]
    assert f"stopped at step {last}, saved" in output
    assert [entry.step for entry in entries(run_dir)] == [last]
