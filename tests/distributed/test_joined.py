"""Two processes of four devices on this machine, joined: they talk, fail and stop as one."""

import json
import signal
import socket
import threading
from unittest.mock import Mock

import pytest
from support.several import ends, several

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import EXIT_UNAVAILABLE, LrkvError

TALK = """
import json, sys
from pathlib import Path
from lrkv_jax.errors import LrkvError
from lrkv_jax.distributed import start
from lrkv_jax.distributed import processes as module
processes = start()
import jax
me = processes.index
def attempt(name, function):
    try:
        function()
    except Exception as error:
        print(json.dumps([name, type(error).__name__ + ": " + str(error)]))
    processes.failed_together = False

print(json.dumps(["place", me, processes.count, jax.process_index(), len(jax.devices())]))
print(json.dumps(["exchange", processes.exchange(f"from {me}")]))

def failing(where, kind=LrkvError):
    def run():
        with processes.together():
            if me in where:
                raise kind("wrong here")
    return run

attempt("first", failing([0]))
attempt("second", failing([1]))
attempt("both", failing([0, 1]))
attempt("bug", failing([1], ValueError))
print(json.dumps(["shared", processes.without_access_to(Path(sys.argv[1]))]))
module._APPEAR_SECONDS = 0.3
own = Path(sys.argv[1]) / str(me)
own.mkdir()
print(json.dumps(["own", processes.without_access_to(own)]))
"""


@pytest.mark.slow
def test_two_processes_talk_and_fail_as_one(tmp_path):
    with several(["-c", TALK, tmp_path]) as running:
        both = ends(running, 60)
    assert [ended.code for ended in both] == [0, 0], both
    first, second = ([json.loads(line) for line in ended.out.splitlines()] for ended in both)
    exchanged = ["exchange", ["from 0", "from 1"]]
    assert first[:2] == [["place", 0, 2, 0, 8], exchanged]
    assert second[:2] == [["place", 1, 2, 1, 8], exchanged]
    errors = [dict(list(line) for line in lines if len(line) == 2) for lines in (first, second)]
    silent = "StoppedElsewhere: "
    assert [e["first"] for e in errors] == ["LrkvError: wrong here", silent]
    assert [e["both"] for e in errors] == ["LrkvError: wrong here", silent]
    at_one, own = errors[0]["second"], errors[1]["second"]
    assert at_one == own and own.startswith("LrkvError: process 1 on ")
    assert own.endswith(": wrong here")
    assert errors[0]["bug"].endswith(": ValueError: wrong here")
    assert errors[1]["bug"] == "ValueError: wrong here"
    for e in errors:
        assert e["shared"] == [] and len(e["own"]) == 1 and e["own"][0].startswith("process 1 on ")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.slow
def test_a_host_with_fewer_devices_is_named_by_all():
    fewer = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    code = (
        "import lrkv_jax.cli as cli; from lrkv_jax.distributed import start; "
        "cli.app = lambda **how: start(); cli.main()"
    )
    with several(["-c", code], places=[{}, fewer]) as running:
        both = ends(running, 60)
    for ended in both:
        assert ended.code == EXIT_UNAVAILABLE
        assert "process 1 on " in ended.err
        assert "sees 3 cpu devices, and another process sees 4" in ended.err


BREAK = """
import time, lrkv_jax.cli as cli
from lrkv_jax.errors import LrkvError
from lrkv_jax.distributed import start
processes = start()
def app(**how):
    if not processes.index:
        time.sleep(60)
    raise LrkvError("broken alone")
cli.app = app
cli.main()
"""


@pytest.mark.slow
def test_a_process_that_breaks_alone_says_so_and_leaves_at_once():
    with several(["-c", BREAK], LRKV_HEARTBEAT_SECONDS="5") as running:
        # JAX's exit would wait for the other process, which is asleep, for minutes.
        _, err = running[1].communicate(timeout=60)
        running[0].wait(20)
    assert running[1].returncode == 2 and "broken alone" in err
    assert running[0].returncode == -signal.SIGABRT, "JAX's service misses the other"
    assert err.startswith("lrkv: process 1 on ") and err.count("\n") == 1


def test_a_host_without_the_gpu_that_is_asked_for_is_one_line(monkeypatch):
    monkeypatch.setattr("jax.local_devices", Mock(side_effect=AssertionError))
    none = "^the devices do not start: none is visible: see JAX_PL"
    with pytest.raises(LrkvError, match=none) as error:
        Processes().check_devices()
    assert error.value.exit_code == EXIT_UNAVAILABLE


def test_a_port_in_use_is_one_line(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("LRKV_COORDINATOR", f"127.0.0.1:{port}")
        monkeypatch.setenv("LRKV_PROCESSES", "2")
        monkeypatch.setenv("LRKV_PROCESS", "0")
        message = f"cannot listen at port {port} .*LRKV_COORDINATOR"
        with pytest.raises(LrkvError, match=message) as error:
            Processes().join()
        assert error.value.exit_code == EXIT_UNAVAILABLE


def test_a_process_that_could_not_join_waits_for_nobody(monkeypatch):
    for name, value in (("COORDINATOR", "127.0.0.1:1"), ("PROCESSES", "2"), ("PROCESS", "1")):
        monkeypatch.setenv(f"LRKV_{name}", value)
    monkeypatch.setattr("jax.distributed.initialize", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        Processes().join()
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "of the line that it waits"
