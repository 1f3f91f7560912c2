"""Of several processes, none outlives the others, and all save the same step."""

import signal
import time

import pytest
from support.fault_runs import ENVIRONMENT, command
from support.several import ends, several

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.run.metrics import read_metrics

LIMIT = 150


def started(pages, run_dir, *overrides):
    arguments = command(pages, run_dir, "attention=mha", "mesh.fsdp=2", *overrides)
    return several(["-m", "lrkv_jax", *arguments], devices=1,
                   XLA_FLAGS=ENVIRONMENT["XLA_FLAGS"])  # fmt: skip


def wait_for_rows(running, run_dir, count):
    deadline = time.monotonic() + LIMIT
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") >= count):
        assert time.monotonic() < deadline
        assert all(p.poll() is None for p in running), [p.communicate() for p in running]
        time.sleep(0.02)


@pytest.mark.faults
def test_a_lost_peer_ends_all_at_once_and_the_run_goes_on_bit_for_bit(pages, tmp_path):
    lost = tmp_path / "lost"
    with started(pages, lost) as running:
        wait_for_rows(running, lost, 11)  # three after a checkpoint
        began = time.monotonic()
        running[1].kill()
        running[0].wait(30)
        seconds = time.monotonic() - began
        first, second = ends(running, 10)
    assert (first.code, second.code) == (75, -signal.SIGKILL)
    assert seconds < 10
    line = first.err.strip().splitlines()[-1]
    assert line.startswith("lrkv: process 1 on ") and "is lost (its connection ended" in line
    assert "the same command resumes from the last checkpoint" in line
    before = read_metrics(lost)
    with started(pages, lost, "--until", str(before[-1]["step"] + 3)) as running:
        again = ends(running, LIMIT)
    assert [ended.code for ended in again] == [0, 0]
    start = int(again[0].out.partition("resuming from step ")[2].split()[0])
    assert 0 < start < before[-1]["step"], "some steps were taken twice"
    after = read_metrics(lost)
    assert [row["step"] for row in after] == list(range(1, before[-1]["step"] + 4))
    for key in ("loss", "grad_norm", "batch", "lr_matrix"):
        assert [row[key] for row in after[: len(before)]] == [row[key] for row in before]


@pytest.mark.nights
def test_a_lost_first_process_ends_the_others(pages, tmp_path):
    with started(pages, tmp_path / "run") as running:
        wait_for_rows(running, tmp_path / "run", 5)
        running[0].kill()
        running[1].wait(30)
        _, second = ends(running, 10)
    # JAX's own service, which was in that process, may be quicker to abort.
    assert second.code in (75, -signal.SIGABRT)
    if second.code == 75:
        assert "lrkv: process 0 on " in second.err and "is lost" in second.err


@pytest.mark.faults
def test_a_silent_peer_is_lost_after_its_time(tmp_path):
    code = "from lrkv_jax.runtime import start; import time; start(); print('up', flush=True); " \
           "time.sleep(60)"  # fmt: skip
    with several(["-c", code], devices=1, LRKV_LOST_SECONDS="4") as running:
        for process in running:
            while process.stdout.readline() != "up\n":
                pass
        running[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        running[0].wait(30)
        seconds = time.monotonic() - began
        running[1].kill()
        first, _ = ends(running, 10)
    assert first.code == 75 and 3 < seconds < 15
    assert "process 1 on " in first.err and "is lost (silent for 4 s)" in first.err


@pytest.mark.faults
def test_sigterm_to_one_process_saves_one_step_in_both(pages, tmp_path):
    run_dir = tmp_path / "run"
    with started(pages, run_dir, "train.steps=100000") as running:
        wait_for_rows(running, run_dir, 3)
        running[1].send_signal(signal.SIGTERM)
        first, second = ends(running, LIMIT)
    assert (first.code, second.code) == (75, 75), (first, second)
    last = read_metrics(run_dir)[-1]["step"]
    assert f"stopped at step {last}, saved" in first.out and second.out == ""
    with Checkpointer(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest() == last
        assert checkpoints.manifest()["loader"]["step"] == last


@pytest.mark.nights
def test_the_end_of_the_time_is_a_signal_to_all(pages, tmp_path):
    run_dir = tmp_path / "run"
    with started(pages, run_dir, "train.steps=100000", "--time-limit", "00:25") as running:
        both = ends(running, LIMIT)
    assert [ended.code for ended in both] == [75, 75], both
    last = read_metrics(run_dir)[-1]["step"]
    assert f"stopped at step {last}, saved" in both[0].out and last > 3


HANG = """
import sys, time
import lrkv_jax.data.loader as loader
honest = loader.Loader.iterate
def slow(self, start, stop):
    for number, batch in enumerate(honest(self, start, stop), start):
        if number == 6:
            time.sleep(60)
        yield batch
loader.Loader.iterate = slow
from lrkv_jax.cli import main
sys.argv = ["lrkv", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_a_batch_that_never_comes_ends_both_processes_with_its_stack(pages, tmp_path):
    run_dir = tmp_path / "run"
    arguments = command(pages, run_dir, "attention=mha", "mesh.fsdp=2", "watchdog.warn_after=8",
                        "watchdog.end_after=12")  # fmt: skip
    with several(["-c", HANG, *arguments], devices=1, XLA_FLAGS=ENVIRONMENT["XLA_FLAGS"]) as both:
        first, second = ends(both, LIMIT)
    assert (first.code, second.code) == (75, 75), (first, second)
    # Both wait; the first whose time is over ends the other. Process 1 speaks on stderr.
    assert "data of step 7 has taken" in first.out
    assert "data of step 7 hangs for" in first.out + second.err
    assert "in slow" in first.err, "the stack shows where"
    with Checkpointer(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 4
