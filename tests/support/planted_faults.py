"""Checks that hang, crash, raise and answer, for the doctor's process; nothing here loads JAX.

PLANTED_CHECKS names those that the process runs, each with its argument: "right hangs:PATH".
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.doctor.checks import Check, run
from lrkv_jax.lab.doctor.finding import OK, Finding, at


def right():
    """Answers with its process, and prints what must not disturb the answer."""
    print('{"found": []}')
    return Finding("right", OK, "it is", "", {"process": os.getpid()})


def hangs(marker=None):
    """Starts a program of its own, and sleeps for ever."""
    if marker:
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(marker).write_text(str(other.pid))
    at("the second half")
    time.sleep(1000)


def sleeps(marker):
    Path(marker).write_text(str(os.getpid()))
    time.sleep(1000)


def crashes():
    print("a library's last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves():
    os._exit(3)


def raises(kind):
    errors = {
        "ours": LrkvError("disk = full: use another"),
        "memory": RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes"),
        "other": ValueError("no\nway"),
    }
    raise errors[kind]


def planted(facts):
    for name in os.environ["PLANTED_CHECKS"].split():
        function, *arguments = name.split(":")
        yield Check(
            function,
            1000 if function == "sleeps" else 1.5,
            "mend it",
            partial(globals()[function], *arguments),
        )
        if function == "right":
            assert facts["right"]["process"]  # an earlier line's figures are there


if __name__ == "__main__":
    run(planted)
