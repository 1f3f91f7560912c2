"""Of several processes, none outlives the others, and all save the same step."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fault_runs import ENVIRONMENT, STEPS, command, learnt, wait_for_rows
from support.several import ends, several

from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.metrics import read_metrics

LIMIT = 150
ROOT = Path(__file__).parents[2]
SRUN = ROOT / "tests" / "support" / "srun.py"
OF_TWO = ("attention=mha", "mesh.fsdp=2")


def job(pages, tmp_path, name, faults):
    """What a run learns that `launch/slurm.sbatch` starts, and starts again; what was printed."""
    run_dir, requeued = tmp_path / name, tmp_path / "requeued"
    (tmp_path / "faults").write_text(faults)
    tools = {"srun": f'exec {sys.executable} {SRUN} "$@"', "scontrol": f"touch {requeued}"}
    for tool, does in tools.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / tool).chmod(0o755)
    environment = ENVIRONMENT | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAULTS": str(tmp_path / "faults"),
        "RUN_DIR": str(run_dir), "SLURM_JOB_ID": str(os.getpid()), "JAX_PLATFORMS": "cpu",
        "LRKV_LOCAL_DEVICES": "1", "LRKV_HEARTBEAT_SECONDS": "6",
    }  # fmt: skip
    command_line = ["bash", "launch/slurm.sbatch", *command(pages, run_dir, *OF_TWO)[1:]]
    printed = []
    for start in range(len(faults.split()) + 1):
        requeued.unlink(missing_ok=True)
        ended = subprocess.run(
            command_line, env=environment | {"SLURM_RESTART_COUNT": str(start)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT, cwd=ROOT,
        )  # fmt: skip
        printed.append(ended.stdout)
        assert requeued.exists() == (ended.returncode != 0), printed[-1]
    assert ended.returncode == 0, printed[-1]
    return learnt(run_dir), printed


@pytest.mark.faults
def test_a_run_whose_processes_are_killed_stopped_and_raise_is_the_run_whose_do_not(
    pages, tmp_path
):
    expected, _ = job(pages, tmp_path, "whole", "")
    broken, printed = job(pages, tmp_path, "broken", "kill stop raise term")
    killed, stopped, raised, ended, last = printed
    assert [row["step"] for row in broken[0]] == list(range(1, STEPS + 1))
    assert broken == expected
    # A collective may fail for want of its partner before the launcher ends the process.
    assert re.search(r"ended with \[(-9|1), -9\]", killed)
    # JAX's service ends the partner of a silent process, or fails its collective.
    assert re.search(r"ended with \[(-6|1), -9\]", stopped)
    assert "RuntimeError: the disk is gone" in raised
    assert re.search(r"ended with \[(-9|1), 1\]", raised)
    # The launcher kills whichever is slower to leave; by then all is saved.
    assert re.search(r"ended with \[(75, 75|75, -9|-9, 75)\]", ended)
    (saved,) = re.findall(r"stopped at step (\d+), saved", ended)
    assert f"resuming from step {saved}\n" in last


@pytest.mark.faults
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_launcher_jaxs_service_ends_the_partner(sent):
    code = (
        "import time; from lrkv_jax.distributed import start; "
        "start(); print('up', flush=True); time.sleep(60)"
    )
    with several(["-c", code], devices=1, LRKV_HEARTBEAT_SECONDS="4") as running:
        for process in running:
            while process.stdout.readline() != "up\n":
                pass
        running[1].send_signal(sent)
        began = time.monotonic()
        running[0].wait(30)
        seconds = time.monotonic() - began
    assert running[0].returncode == -signal.SIGABRT and 1 < seconds < 15


@pytest.mark.faults
def test_sigterm_to_one_process_saves_one_step_in_both(pages, tmp_path):
    run_dir = tmp_path / "run"
    arguments = command(pages, run_dir, *OF_TWO, "train.steps=100000")
    flags = ENVIRONMENT["XLA_FLAGS"]
    with several(["-m", "lrkv_jax.cli", *arguments], devices=1, XLA_FLAGS=flags) as running:
        wait_for_rows(run_dir, 3, *running)
        running[1].send_signal(signal.SIGTERM)
        first, second = ends(running, LIMIT)
    assert (first.code, second.code) == (75, 75), (first, second)
    last = read_metrics(run_dir)[-1]["step"]
    assert f"stopped at step {last}, saved" in first.out and second.out == ""
    with Checkpointer(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.steps()[-1] == last
        assert checkpoints.manifest()["loader"]["step"] == last
