"""A run directory has one trainer, and the kernel frees the lock of one that died."""

import contextlib
import errno
import os
import subprocess
import sys
from unittest.mock import Mock

import jax
import pytest

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import EXIT_UNAVAILABLE, LrkvError
from lrkv_jax.training.loop import train
from lrkv_jax.training.run_dir import RunLock, is_training, open_run
from lrkv_jax.training.state import resolve

# A holder without the package, whose imports take seconds: locks, writes who it is, and waits.
HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
os.pwrite(file, b"process 7 on hal\\n", 0)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(directory):
    """A live process of this machine that holds the lock of a directory."""
    command = [sys.executable, "-IS", "-c", HOLD, str(directory / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield
        process.kill()


def take_and_release(directory):
    with RunLock(directory, Processes()):
        assert f"process {os.getpid()} on " in (directory / "lock").read_text()
    assert not (directory / "lock").exists()


def test_a_live_holder_is_named_and_its_death_frees_the_lock(tmp_path):
    with held(tmp_path):
        with pytest.raises(LrkvError, match="process 7 on hal: wait") as error:
            take_and_release(tmp_path)
        assert error.value.exit_code == EXIT_UNAVAILABLE
        assert (tmp_path / "lock").exists()
    take_and_release(tmp_path)


def test_who_asks_in_the_trainer_s_process_does_not_free_its_lock(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    ask = "from lrkv_jax.training import run_dir; print(run_dir.is_training('run'))"
    with RunLock(tmp_path / "run", Processes()):
        assert is_training(tmp_path / "link")
        with pytest.raises(LrkvError, match="is being trained by this process: wait"):
            take_and_release(tmp_path / "link")
        assert subprocess.check_output([sys.executable, "-c", ask], cwd=tmp_path) == b"True\n"
    assert not is_training(tmp_path / "run")


def test_a_second_trainer_is_refused_and_touches_nothing(tiny):
    directory = open_run(resolve(tiny()))
    before = (directory / "config.yaml").read_bytes()
    with held(directory), pytest.raises(LrkvError, match="is being trained by"):
        train(tiny("train.log_every=7"), devices=jax.devices()[:1])
    assert sorted(os.listdir(directory)) == ["config.yaml", "lock"]
    assert (directory / "config.yaml").read_bytes() == before


def test_a_file_system_without_locks_is_trained_in(tmp_path, monkeypatch):
    none = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr("fcntl.lockf", Mock(side_effect=none))
    take_and_release(tmp_path)
