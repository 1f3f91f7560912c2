"""One process that is told to stop: at the end of its step, at the end of its time, or at once."""

import signal
import subprocess
import sys
import time

import pytest
from support.fault_runs import ENVIRONMENT, command, wait_for_rows

from lrkv_jax.training.checkpointing.inspect import entries, verify
from lrkv_jax.training.metrics import read_metrics

pytestmark = pytest.mark.faults

LIMIT = 120
ENDLESS = ("train.steps=100000", "train.save_every=0")


def started(pages, run_dir, *more, **environment):
    arguments = ["-m", "lrkv_jax.cli", *command(pages, run_dir, "attention=mha", *ENDLESS, *more)]
    return subprocess.Popen(
        [sys.executable, *arguments], env=ENVIRONMENT | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_the_step_compiles_ends_the_run_in_one_line(pages, tmp_path, name):
    # A program that is kept would be there before the signal.
    run = started(pages, tmp_path / "run", LRKV_COMPILATION_CACHE="off")
    while "mesh" not in (line := run.stdout.readline()):  # what is said before compiling begins
        assert line, run.communicate()
    time.sleep(0.5)
    run.send_signal(getattr(signal, name))
    output, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, output + errors
    assert errors == f"lrkv: ended by {name} with nothing to save: the same command resumes\n"
    assert "compiled in" not in output
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_sigterm_finishes_the_step_saves_and_says_start_me_again(pages, tmp_path):
    run_dir = tmp_path / "run"
    run = started(pages, run_dir)
    wait_for_rows(run_dir, 5, run)
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, output + errors
    rows = read_metrics(run_dir)
    assert [(e.step, verify(e).damage) for e in entries(run_dir)] == [(rows[-1]["step"], None)]
    assert "SIGTERM: finishing the step, then saving" in output, "it is said at once"
    assert "the same command resumes" in output


def test_a_second_signal_leaves_the_last_checkpoint_as_it_was(pages, tmp_path):
    run_dir = tmp_path / "run"
    run = started(pages, run_dir, "train.save_every=3")
    wait_for_rows(run_dir, 8, run)
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
