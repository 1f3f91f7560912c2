"""Checks that hang, crash, raise and answer, for the doctor's process; nothing here loads JAX."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.doctor.finding import OK, Finding, at

WHO = {"n": 0}


def right(value=0):
    """Answers, with how often this process has, and prints what must not disturb the answer."""
    WHO["n"] += 1
    print('{"findings": []}')
    return Finding("right", OK, f"{value}", "", {"times": WHO["n"], "process": os.getpid()})


def hangs(marker=None):
    """Starts a program of its own, and sleeps for ever."""
    if marker:
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(marker).write_text(str(other.pid))
    at("the second half")
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
