"""Several processes of one run on this machine: started together, and ended whatever happens."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

DEVICES = "--xla_force_host_platform_device_count"
FEW_OPTIMISATIONS = "--xla_backend_optimization_level=0"  # as in the tests' own process


@dataclass(frozen=True)
class Ended:
    """How a process ended. Gloo's own lines are not counted as text."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def several(command, *, count=2, devices=4, places=None, **environment):
    """Start `command` (arguments of python) `count` times with `devices` simulated devices each.

    "{process}" in it is the process's number; `places` has each one's own variables. Yields the
    processes; kills what is left of them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = []
    try:
        for process in range(count):
            own = {
                "LRKV_COORDINATOR": address,
                "LRKV_PROCESSES": str(count),
                "LRKV_PROCESS": str(process),
                "LRKV_JOIN_SECONDS": "60",
                "XLA_FLAGS": f"{DEVICES}={devices} {FEW_OPTIMISATIONS}",
                **environment,
                **(places[process] if places else {}),
            }
            running.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        *(str(part).replace("{process}", str(process)) for part in command),
                    ],
                    env={**os.environ, **own},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parents[2],
                )
            )
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.communicate()


def is_gloos(line: str) -> bool:
    """Whether a line is Gloo's, or a piece of one: its threads write into each other's."""
    return "Gloo" in line or "peer ranks" in line or re.fullmatch(r"[\d\s]*", line) is not None


def ends(running, seconds) -> list[Ended]:
    """How the processes end, all within `seconds`."""
    deadline = time.monotonic() + seconds
    ended = []
    for process in running:
        out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
        out = "".join(line for line in out.splitlines(True) if not is_gloos(line))
        ended.append(Ended(process.returncode, out, err))
    return ended
