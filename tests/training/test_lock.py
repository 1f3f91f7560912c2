"""A run directory has one trainer; a lock whose holder is gone is named and taken over (A6)."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading

import jax
import pytest

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError
from lrkv_jax.training import lock as module
from lrkv_jax.training.lock import RunLock
from lrkv_jax.training.loop import train
from lrkv_jax.training.run_dir import open_run
from lrkv_jax.training.state import resolve

# A holder without the package, whose imports take seconds: locks, writes who it is, and waits.
HOLD = """
import fcntl, json, os, sys
path, machine = sys.argv[1:]
file = os.open(path, os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
me = {"host": "hal", "machine": machine, "pid": os.getpid(), "token": "other", "since": 1}
os.pwrite(file, json.dumps(me).encode(), 0)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(directory):
    """A live process of this machine that holds the lock of a directory."""
    command = [sys.executable, "-IS", "-c", HOLD, str(directory / "lock"), module._machine()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def write(path, **content):
    path.write_text(json.dumps({"host": "hal", "pid": 7, "token": "other", **content}))


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(module, "STALE_SECONDS", 1.5)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)


def taken(directory):
    """What was said while the lock was taken and let go again."""
    said = []
    with RunLock(directory, said.append, Processes()) as lock:
        lock.take()
        lock.take()  # it is there
        there = json.loads((directory / "lock").read_text())
        assert (there["pid"], there["host"]) == (os.getpid(), socket.gethostname())
    assert not (directory / "lock").exists()
    return said


def test_a_lock_is_held_until_its_end_and_leaves_nothing(tmp_path):
    with RunLock(tmp_path, pytest.fail, Processes()) as lock:
        lock.take(if_there=True)
        assert os.listdir(tmp_path) == []
    assert taken(tmp_path) == taken(tmp_path) == []


def test_a_live_holder_is_named_and_its_death_frees_the_lock(tmp_path):
    with held(tmp_path) as holder:
        with pytest.raises(LrkvError) as error, RunLock(tmp_path, pytest.fail, Processes()) as lock:
            lock.take(if_there=True)
        text = str(error.value)
        assert f"is being trained by process {holder.pid} on hal, since" in text
        assert "\n" not in text and (tmp_path / "lock").exists()
    (said,) = taken(tmp_path)
    assert f"taken over from process {holder.pid} on hal" in said and said.endswith("is gone")


def test_a_second_trainer_is_refused_and_touches_nothing(tiny):
    """Both ran, and 50 saves failed."""
    directory = open_run(resolve(tiny()))
    before = (directory / "config.yaml").read_bytes()
    with held(directory), pytest.raises(LrkvError, match="is being trained by") as error:
        train(tiny("train.log_every=7"), devices=jax.devices()[:1])
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(directory)) == ["config.yaml", "lock"]
    assert (directory / "config.yaml").read_bytes() == before


def test_another_hosts_lock_is_a_live_ones_while_it_is_touched(tmp_path, hurried):
    """Where the file system passes no locks between hosts, the time of the file says it."""
    write(tmp_path / "lock", machine="another")
    over = threading.Event()

    def beat():
        while not over.wait(0.05):
            os.utime(tmp_path / "lock")

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(LrkvError, match="trained by process 7 on hal"):
            taken(tmp_path)
    finally:
        over.set()
        beating.join()
    waiting, over = taken(tmp_path)
    assert "waiting up to" in waiting and "taken over from process 7 on hal" in over


def test_without_locks_in_the_file_system_the_time_of_the_file_says_it(
    tmp_path, hurried, monkeypatch
):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    write(tmp_path / "lock", machine=module._machine())
    waiting, over = taken(tmp_path)
    assert "waiting up to" in waiting and "which is gone" in over


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": "x"}', "\0" * 40])
def test_a_garbled_lock_of_nobody_is_taken(tmp_path, hurried, content):
    (tmp_path / "lock").write_text(content)
    taken(tmp_path)


@pytest.mark.parametrize("removed", [False, True], ids=["overwritten", "removed and made again"])
def test_whoever_loses_the_lock_ends(tmp_path, hurried, monkeypatch, capsys, removed):
    left, alone = threading.Event(), Processes()
    monkeypatch.setattr(alone, "leave", lambda code: left.set())
    with RunLock(tmp_path, pytest.fail, alone) as lock:
        lock.take()
        if removed:  # by hand: the first trainer went on, and removed the other's lock at its end
            (tmp_path / "lock").unlink()
        write(tmp_path / "lock")
        assert left.wait(30)
    assert "was taken by process 7 on hal: this one ends" in capsys.readouterr().err
    assert (tmp_path / "lock").exists(), "it is the other's"
