"""The processes of a run as one: joining, failing together, and looking at the same files.

What they say to each other here goes through the key-value store of JAX's coordination service:
no device takes part, so it works while devices differ, and may wait for hours. A process alone
needs none of it, and every function is then as cheap as a comparison.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

# The client has no public name. Orbax and JAX's own multihost_utils take it from here.
from jax._src import distributed

from lrkv_jax.errors import LrkvError
from lrkv_jax.runtime import hosts, peers
from lrkv_jax.runtime.meeting import meet

JOIN_SECONDS = 300
# Process 0 may build a dataset while the others wait.
_PATIENCE_MS = 7 * 24 * 3600 * 1000
# What is made on one host shows on the others once their network file system looks again.
_APPEAR_SECONDS = 30

_talks = itertools.count()  # the same number in every process: all run the same program
_host_names: list[str] = []
_peers: peers.Peers | None = None

# Whether the error that ends this process ends all of them, so that they may leave in order.
failed_together = False
# A library has left threads in this process that an ordinary exit would wait for: Orbax's, after a
# save that failed, wait ten minutes for each other.
end_at_once = False


class StoppedElsewhere(LrkvError):
    """Another process says what is wrong; this one's message is empty."""


def join() -> hosts.Place | None:
    """Make this process one of its run's, if its environment says that there are more.

    Must come before anything touches a device. Returns its place, None if it is alone. A program
    that has called `jax.distributed.initialize` itself is left as it is.

    Raises `LrkvError` as `hosts.find` and `meeting.meet` do.
    """
    global _peers
    place = hosts.find(os.environ)
    if place is None or jax.distributed.is_initialized():
        return None
    seconds = _seconds(os.environ, "LRKV_JOIN_SECONDS", JOIN_SECONDS)
    devices = hosts.share_of_devices(place, os.environ)
    lost_seconds = _seconds(os.environ, "LRKV_LOST_SECONDS", peers.LOST_SECONDS)
    _host_names[:], calls = meet(place, seconds=seconds)
    _peers = peers.Peers(place.process, calls, name, lost_seconds)
    with _own_sigterm():
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.processes,
            process_id=place.process,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(seconds),
            # A backstop: JAX's service ends a process by a C++ abort, without the exit code 75.
            heartbeat_timeout_seconds=max(100, 2 * lost_seconds),
        )
    return place


def _seconds(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or not int(text):
        raise LrkvError(f"{name} = {text}: use a whole number of seconds")
    return int(text)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Undo what JAX's preemption service does to SIGTERM: it swallows it, from then on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def count() -> int:
    """How many processes the run has."""
    return distributed.global_state.num_processes


def index() -> int:
    """Which of them this one is."""
    return distributed.global_state.process_id


def name(process: int) -> str:
    """A process's number and, where `join` has met it, its host."""
    known = _host_names or [None] * (process + 1)
    return f"process {process}" + (f" on {known[process]}" if known[process] else "")


def who() -> str:
    """How a line begins that one of several processes says for itself; nothing in process 0."""
    return f"{name(index())}: " if index() else ""


def must_leave() -> bool:
    """Whether an error of this process is news to the others, so that it must `leave`."""
    return count() > 1 and not failed_together


def leave(code: int) -> None:
    """Exit at once, and have the others end with the same code.

    An ordinary exit would wait in JAX for minutes for the others, and they for this one's devices.
    """
    if _peers is not None:
        _peers.goodbye(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a terminal that went away
            stream.flush()
    os._exit(code)


def client():
    """The coordination service's client; only where `count()` is more than 1."""
    return distributed.global_state.client


def wait_for_all(name: str) -> None:
    """Return when every process has called this with the same name; each name serves once."""
    if count() > 1:
        client().wait_at_barrier(name, timeout_in_ms=_PATIENCE_MS)


def exchange(value: str) -> list[str]:
    """What every process gave to this call, in order; it ends when all have."""
    if count() == 1:
        return [value]
    talk = f"lrkv/talk/{next(_talks)}"
    client().key_value_set(f"{talk}/{index()}", value)
    wait_for_all(talk)
    said = {
        int(key.rpartition("/")[2]): text for key, text in client().key_value_dir_get(f"{talk}/")
    }
    return [said[process] for process in range(count())]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that every process runs: it ends when all have, and fails in all if it does in one.

    The process that failed raises its own error, named after it; if it is the same as process 0's,
    process 0 alone does. Process 0 raises another's. The rest raise `StoppedElsewhere`.
    """
    global failed_together
    if count() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    me, text = index(), None if failure is None else _one_line(failure)
    texts = [json.loads(said) for said in exchange(json.dumps(text))]
    failed = [process for process, text in enumerate(texts) if text is not None]
    if not failed:
        return
    failed_together = True
    if failure is not None and (me == 0 or texts[0] != text):
        if me == 0 or not isinstance(failure, LrkvError):
            raise failure
        raise LrkvError(f"{name(me)}: {text}") from failure
    if me == 0:
        raise LrkvError(f"{name(failed[0])}: {texts[failed[0]]}")
    raise StoppedElsewhere from failure


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, LrkvError) else f"{type(error).__name__}: {text[:300]}"


def check_devices() -> None:
    """Raise `LrkvError` for a process that sees other devices than planned, or than its peers.

    Planned is `LRKV_LOCAL_DEVICES`. Starts the backend.
    """
    planned = os.environ.get("LRKV_LOCAL_DEVICES")
    if planned is not None and not (planned.isdecimal() and int(planned)):
        raise LrkvError(f"LRKV_LOCAL_DEVICES = {planned}: use a whole number from 1")
    with together():
        try:
            here, all_devices = jax.local_devices(), jax.devices()
        except RuntimeError as error:
            raise LrkvError(f"the devices do not start: {_one_line(error)}") from error
        seen = {p: 0 for p in range(count())}
        for device in all_devices:
            seen[device.process_index] += 1
        wanted, whence = max(seen.values()), "another process sees"
        if planned is not None:
            wanted, whence = int(planned), "LRKV_LOCAL_DEVICES plans"
        if len(here) != wanted:
            raise LrkvError(
                f"{socket.gethostname()} sees {len(here)} {here[0].device_kind} devices, and "
                f"{whence} {wanted}: mend or leave out the host, or plan for what it has"
            )


def that_do_not_see(directory: Path) -> list[str]:
    """The names of the processes that do not see what process 0 writes in a directory."""
    if count() == 1:
        return []
    mark = exchange(secrets.token_hex(8))[0]
    path = directory / f".seen-by-all-{mark}"
    with together():
        if index() == 0:
            path.touch()
    deadline = time.monotonic() + _APPEAR_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        # Listing a directory renews what a network file system remembers of it.
        with contextlib.suppress(OSError):
            os.listdir(directory)
        time.sleep(0.1)
    seen = exchange(json.dumps(path.exists()))
    if index() == 0:
        path.unlink(missing_ok=True)
    return [name(process) for process, saw in enumerate(seen) if not json.loads(saw)]
