"""Stands in for Slurm's `srun --kill-on-bad-exit=1 lrkv ...`: two tasks on this host.

A task that ends with another code than 0 takes the other along, and the highest code is the
answer. Each start does what the next line of the file FAULTS says to the second task, once the run
of RUN_DIR has taken ten steps more than before: `kill`, `stop` (SIGSTOP), `term` (SIGTERM), or
`raise`, for which the task is started with a loader that raises.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RAISING = """
import sys
from lrkv_jax.cli import main
from lrkv_jax.data.loader import Loader
honest = Loader.iterate
def breaking(self, start, stop):
    for number, batch in enumerate(honest(self, start, stop)):
        if number == 10:
            raise RuntimeError("the disk is gone")
        yield batch
Loader.iterate = breaking
sys.argv = ["lrkv", *sys.argv[1:]]
main()
"""


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def steps():
    metrics = Path(os.environ["RUN_DIR"], "metrics.jsonl")
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def start(number, fault, arguments):
    place = {
        "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_ID": os.environ["SLURM_RESTART_COUNT"],
    }  # fmt: skip
    entry = ["-c", RAISING] if fault == "raise" and number else ["-m", "lrkv_jax.cli"]
    return subprocess.Popen([sys.executable, *entry, *arguments], env={**os.environ, **place})


def main():
    kill, lrkv, *arguments = sys.argv[1:]
    assert (kill, lrkv) == ("--kill-on-bad-exit=1", "lrkv")
    faults = Path(os.environ["FAULTS"])
    fault, *rest = [*faults.read_text().split(), ""]
    faults.write_text(" ".join(rest))
    before, codes = steps(), [None, None]
    tasks = [start(number, fault, arguments) for number in range(2)]
    while None in codes:
        time.sleep(0.02)
        if fault in SIGNALS and steps() >= before + 10:
            tasks[1].send_signal(SIGNALS[fault])
            fault = ""
        codes = [task.poll() for task in tasks]
        if any(codes):
            for task in tasks:
                task.kill()
            codes = [task.wait() for task in tasks]
    print(f"srun: the tasks ended with {codes}", flush=True)
    sys.exit(max(128 - code if code < 0 else code for code in codes))


main()
