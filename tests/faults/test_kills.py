"""Killed at any instant and started again, a run is the run that nothing interrupted."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.fault_runs import ENVIRONMENT, STEPS, command, learnt
from support.warm import Warm

from lrkv_jax.training.metrics import read_metrics

LIMIT = 120  # seconds for one life of a run


@pytest.fixture(scope="module")
def warm():
    with Warm(ENVIRONMENT) as warm:
        yield warm


def instant(rng: random.Random, run_dir: Path, ended) -> str:
    """Wait for an instant drawn at random; returns what it was."""
    deadline = time.monotonic() + LIMIT

    def until(happens) -> None:
        while not happens() and ended() is None:
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.002)

    def rows() -> int:
        return len(read_metrics(run_dir))

    kind = rng.choice(["time", "step", "save", "saved"])
    checkpoints = run_dir / "checkpoints"
    if kind == "time":  # mostly while it starts
        time.sleep(rng.uniform(0, 4))
        return kind
    before = rows()
    until(lambda: rows() != before)  # rows past the checkpoint went: it has started
    after = rows() + rng.randrange(1, 16)
    until(lambda: rows() >= after)
    if kind == "save":
        until(lambda: any(checkpoints.glob(".saving-*")))
        time.sleep(rng.uniform(0, 0.25))
    elif kind == "saved":
        there = {path.name for path in checkpoints.glob("[0-9]*")}
        until(lambda: {path.name for path in checkpoints.glob("[0-9]*")} - there)
        time.sleep(rng.uniform(0, 0.01))
    else:
        time.sleep(rng.uniform(0, 0.03))
    return kind


def killed_again_and_again(warm, arguments, run_dir: Path, output: Path, kills: int, seed: int):
    """Start the run, kill it, start it again; after `kills` kills let it come to its end."""
    rng, done, kinds = random.Random(seed), 0, []
    while done < kills:
        process = warm.start(arguments, output)
        kinds.append(instant(rng, run_dir, lambda pid=process: warm.ended(pid)))
        if warm.ended(process) is None:
            os.kill(process, signal.SIGKILL)
        if (code := warm.wait(process)) == -signal.SIGKILL:
            done += 1
        else:  # it came to its end before the kill did: from the start again
            assert code == 0, output.read_text()
            shutil.rmtree(run_dir / "checkpoints")
    process = warm.start(arguments, output)
    assert warm.wait(process) == 0, output.read_text()
    return kinds


def whole(warm, variant, pages, run_dir: Path, *overrides, **environment):
    """What a run learns that nothing interrupts."""
    output = run_dir.with_suffix(".txt")
    arguments = command(pages, run_dir, f"attention={variant}", *overrides)
    process = warm.start(arguments, output, **environment)
    assert warm.wait(process) == 0, output.read_text()
    return learnt(run_dir)


@pytest.mark.slow
def test_a_run_repeats_itself_with_and_without_compiled_programs_kept(warm, pages, tmp_path):
    some = "--until", "10"
    kept = whole(warm, "mha", pages, tmp_path / "kept", *some)
    without = whole(warm, "mha", pages, tmp_path / "off", *some, LRKV_COMPILATION_CACHE="off")
    again = whole(warm, "mha", pages, tmp_path / "again", *some)
    assert kept == without == again
    cached = [read_metrics(tmp_path / n)[0]["compile_cached"] for n in ("off", "again")]
    assert cached == [False, True]


@pytest.mark.faults
def test_a_run_killed_many_times_is_the_run_that_was_not(warm, pages, tmp_path):
    """LRKV_TEST_KILLS=3000 takes a night; LRKV_TEST_VARIANT is another variant."""
    variant = os.environ.get("LRKV_TEST_VARIANT", "lrkv")
    kills, seed = int(os.environ.get("LRKV_TEST_KILLS", "15")), 4
    expected, *expected_rest = whole(warm, variant, pages, tmp_path / "whole")
    broken, output = tmp_path / "broken", tmp_path / "broken.txt"
    arguments = command(pages, broken, f"attention={variant}")
    kinds = killed_again_and_again(warm, arguments, broken, output, kills, seed)
    rows, *rest = learnt(broken)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), kinds
    assert rows == expected, kinds
    assert rest == expected_rest, kinds
    assert "is damaged" not in output.read_text(), "a kill leaves no half step"
    left = [p.name for p in (broken / "checkpoints").iterdir() if not p.name.isdecimal()]
    assert left == [], "what killed saves left was removed"
    starts = set(re.findall(r"resuming from step (\d+)", output.read_text()))
    assert len(starts) >= 3 and len(set(kinds)) >= 3, "the kills were all alike"
