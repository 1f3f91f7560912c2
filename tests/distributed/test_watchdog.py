"""What hangs is named with its stacks, and ended after its time."""

import subprocess
import sys
import time

import pytest

from lrkv_jax.distributed.watchdog import COMPILE, Watchdog
from lrkv_jax.errors import EXIT_UNAVAILABLE

HANG = """
import os, time
from lrkv_jax.distributed.watchdog import Watchdog
def a_batch_that_never_comes():
    time.sleep(30)
with Watchdog(0.2, 1, warn=lambda text: print(text, flush=True), leave=os._exit) as watchdog:
    watchdog.at("data", 12)
    a_batch_that_never_comes()
"""


def test_a_hang_is_told_with_stacks_and_ended_to_be_started_again():
    began, command = time.monotonic(), [sys.executable, "-c", HANG]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_UNAVAILABLE and time.monotonic() - began < 25
    first, *_, last = ended.stdout.splitlines()
    assert first.startswith("data of step 12 has taken 0 s: stacks follow")
    assert "hangs for 1 s: this process ends" in last and "watchdog.end_after" in last
    assert "in a_batch_that_never_comes" in ended.stderr


@pytest.mark.parametrize(
    ("activity", "limits"),
    [(COMPILE, (0.1, 0.2)), ("step", (0.2, None)), ("step", (None, None))],
)
def test_compiling_is_told_and_never_ended_and_none_is_never(activity, limits):
    warnings, left = [], []
    with Watchdog(*limits, warn=warnings.append, leave=left.append) as watchdog:
        watchdog.at(activity, 1)
        time.sleep(0.7)
    assert bool(warnings) == (limits[0] is not None) and not left
    assert len(warnings) <= 3, "again when the time has doubled, not all the time"
