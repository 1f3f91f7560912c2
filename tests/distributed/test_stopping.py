"""A signal ends the step, a second one the process; before the steps the first one does."""

import signal
import subprocess
import sys
import time

import pytest

from lrkv_jax.distributed.stopping import SIGNALS, Stopping

WAITING = """
import time
from lrkv_jax.distributed.stopping import Stopping
with Stopping() as stopping, stopping.hold() as stop_requested:
    print("ready", flush=True)
    while not stop_requested.here():
        time.sleep(0.3)
    time.sleep(0.3)  # as in a save
    print("stopped", stopping.signal, flush=True)
"""
# Python's handlers wait for this thread to come back to Python, as from a step of minutes.
IN_A_CALL = """
import numpy as np
from lrkv_jax.distributed.stopping import Stopping
with Stopping() as stopping, stopping.hold():
    x = np.random.default_rng(0).normal(size=(6000, 6000))
    print("ready", flush=True)
    x @ x @ x @ x @ x @ x @ x @ x
"""
# As while a step is compiled: another thread works, and the main one waits where Python cannot.
BEFORE_THE_STEPS = """
import threading, time
from lrkv_jax.distributed.stopping import Stopping
with Stopping() as stopping:
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    threading.Lock().acquire() and threading.Event().wait(60)
"""


def started(code, *before):
    process = subprocess.Popen(
        [*before, sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
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


def test_what_nohup_has_set_to_be_ignored_stays_ignored():
    process = started(BEFORE_THE_STEPS, "sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_second_signal_ends_at_once_whatever_the_main_thread_does():
    process, number = started(IN_A_CALL), signal.SIGINT
    process.send_signal(number)
    time.sleep(0.8)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and time.monotonic() - began < 5
    assert err == "lrkv: second signal: ended at once, nothing saved\n"


def test_the_callers_handlers_come_back():
    def now():
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        return descriptor, [signal.getsignal(s) for s in SIGNALS]

    before = now()
    with Stopping():
        assert now() != before
    assert now() == before
