"""A signal ends the step, a second one the process, and so does the end of the time."""

import signal
import subprocess
import sys
import time

import pytest

from lrkv_jax.runtime.stopping import Stopping

WAITING = """
import time
from lrkv_jax.runtime.stopping import Stopping
with Stopping(0) as stopping:
    print("ready", flush=True)
    while not stopping.after(1):
        time.sleep(0.3)
    time.sleep(0.3)  # as in a save
    print("stopped", stopping.signal, flush=True)
"""
# Python's handlers wait for this thread to come back to Python, as from a step of minutes.
IN_A_CALL = """
import numpy as np
from lrkv_jax.runtime.stopping import Stopping
with Stopping(0) as stopping:
    x = np.random.default_rng(0).normal(size=(6000, 6000))
    print("ready", flush=True)
    x @ x @ x @ x @ x @ x @ x @ x
"""


def started(code):
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_one_signal_is_noted_and_a_repeated_one_is_the_same():
    # A launcher and the scheduler behind it may both send it.
    process = started(WAITING)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, f"stopped {int(signal.SIGTERM)}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_whatever_the_main_thread_does(number):
    process = started(IN_A_CALL)
    process.send_signal(number)
    time.sleep(0.8)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and time.monotonic() - began < 5
    assert err == "lrkv: second signal: ended at once, nothing saved\n"


def test_the_deadline_stops_after_the_step_that_passes_it():
    with Stopping(0, deadline=time.monotonic() + 0.3) as stopping:
        assert not stopping.after(1)
        time.sleep(0.4)
        assert stopping.after(2) and stopping.signal is None


def test_the_callers_handlers_come_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with Stopping(0):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    after = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(after)
    assert after == wakeup
