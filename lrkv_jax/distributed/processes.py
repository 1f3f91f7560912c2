"""The processes of a run as one: joining, failing together, and looking at the same files.

Their messages go through the key-value store of JAX's coordination service:
no device takes part, so it works while devices differ, and may wait for hours. A process alone
needs none of it, and every method is then as cheap as a comparison.

Importing this module does not import JAX: a signal or a wrong command line may come before.
"""

import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lrkv_jax.distributed import cluster_env
from lrkv_jax.errors import EXIT_FAULT, EXIT_UNAVAILABLE, LrkvError

JOIN_SECONDS = 300
# JAX's service ends the processes of a run this long after one of them was last alive.
HEARTBEAT_SECONDS = 60
# A process that waits this long for the others prints where: JAX ends it without that.
_WAIT_SECONDS = 10
# Process 0 may build a dataset while the others wait.
_PATIENCE_MS = 7 * 24 * 3600 * 1000
# What is made on one host shows on the others once their network file system looks again.
_APPEAR_SECONDS = 30


class StoppedElsewhere(LrkvError):
    """Another process reports what is wrong; this one's message is empty."""


class Processes:
    """The `count` processes of a run, as process `index` of them knows them; alone until `join`."""

    def __init__(self):
        self.count, self.index = 1, 0
        self.client: Any = None  # of JAX's coordination service; only where `count` is more than 1
        # Whether the error that ends this process ends all of them, so that they leave in order.
        self.failed_together = False
        # A library has left threads in this process that an ordinary exit would wait for: Orbax's,
        # after a save that failed, wait ten minutes for each other.
        self.end_at_once = False
        self._hosts: list[str] = []
        self._topics = itertools.count()  # the same in every process: all run the same program

    def join(self) -> None:
        """Make this process one of its run's, if its environment describes more processes.

        Must come before anything touches a device. A program that has called
        `jax.distributed.initialize` itself is left as it is. Where the others do not come in time,
        and where one of them dies later, JAX's service ends this process by SIGABRT.

        Raises `LrkvError` as `cluster_env.find` does, and where process 0 cannot listen.
        """
        import jax

        place = cluster_env.find(os.environ)
        if place is None or jax.distributed.is_initialized():
            self.as_jax_knows()
            return
        seconds = cluster_env.number(os.environ, "LRKV_JOIN_SECONDS", 1) or JOIN_SECONDS
        heartbeat = cluster_env.number(os.environ, "LRKV_HEARTBEAT_SECONDS", 1)
        # It would take SIGTERM for itself, which `stopping` waits for.
        jax.config.update("jax_enable_preemption_service", False)
        if place.process == 0:
            _check_port(place.coordinator)
        timer = _warn_later(place, seconds)
        try:
            jax.distributed.initialize(
                coordinator_address=place.coordinator,
                num_processes=place.processes,
                process_id=place.process,
                cluster_detection_method="deactivate",
                initialization_timeout=seconds,
                heartbeat_timeout_seconds=heartbeat or HEARTBEAT_SECONDS,
            )
        finally:
            timer.cancel()
        self.as_jax_knows()
        self._hosts = self.exchange(socket.gethostname())

    def as_jax_knows(self) -> Self:
        """This process, one of several where `jax.distributed.initialize` was called before."""
        # The client has no public name. Orbax and JAX's multihost_utils take it from here.
        from jax._src.distributed import global_state as jax_state

        self.count, self.index = jax_state.num_processes, jax_state.process_id
        self.client = jax_state.client
        return self

    def name(self, process: int) -> str:
        """A process's number and, where `join` has learnt it, its host."""
        return f"process {process}" + (f" on {self._hosts[process]}" if self._hosts else "")

    def who(self) -> str:
        """The beginning of a line from one of several processes; empty in process 0."""
        return f"{self.name(self.index)}: " if self.index else ""

    def must_leave(self) -> bool:
        """Whether an error of this process is news to the others, so that it must `leave`."""
        return self.count > 1 and not self.failed_together

    def leave(self, code: int) -> None:
        """Exit at once; the launcher ends the others, or JAX's service does as after a kill.

        An ordinary exit would wait in JAX for minutes for the others, and they for this one's
        devices.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a full disk; a terminal that went away
                stream.flush()
        os._exit(code)

    def topic(self, about: str) -> str:
        """A new name in the service's store, the same in all processes."""
        return f"lrkv/{about}/{next(self._topics)}"

    def wait_for_all(self, name: str) -> None:
        """Return when every process has called this with the same name; each name serves once."""
        if self.count > 1:
            self.client.wait_at_barrier(name, timeout_in_ms=_PATIENCE_MS)

    def exchange(self, value: Any) -> list[Any]:
        """The values (JSON) that all processes pass to this call, in order. It waits for all."""
        if self.count == 1:
            return [value]
        topic = self.topic("exchange")
        self.client.key_value_set(f"{topic}/{self.index}", json.dumps(value))
        self.wait_for_all(topic)
        values = dict(self.client.key_value_dir_get(f"{topic}/"))
        return [json.loads(values[f"{topic}/{process}"]) for process in range(self.count)]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that every process runs: it ends when all have, and fails in all if in one.

        The process that failed raises its error, under its name; if it is the same as process 0's,
        process 0 alone does. Process 0 raises another's. The rest raise `StoppedElsewhere`.
        """
        if self.count == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        own = [failure and _one_line(failure), getattr(failure, "exit_code", EXIT_FAULT)]
        ends = self.exchange(own)
        failed = [process for process, (text, _) in enumerate(ends) if text is not None]
        if not failed:
            return
        self.failed_together = True
        if failure is not None and (self.index == 0 or ends[0] != own):
            if self.index == 0 or not isinstance(failure, LrkvError):
                raise failure
            raise LrkvError(f"{self.name(self.index)}: {failure}", failure.exit_code) from failure
        text, code = ends[failed[0]]
        if self.index == 0:
            raise LrkvError(f"{self.name(failed[0])}: {text}", code)
        raise StoppedElsewhere(exit_code=code) from failure

    def check_equal(self, facts: Mapping[str, str]) -> None:
        """Raise `LrkvError` where one of the named facts is another here than in process 0."""
        first = self.exchange(facts if self.index == 0 else None)[0]
        with self.together():
            for what in first | facts:
                if facts.get(what) != first.get(what):
                    raise LrkvError(
                        f"{what} = {facts.get(what)}, and {first.get(what)} in process 0: give "
                        "all processes the same"
                    )

    def check_devices(self) -> None:
        """Raise `LrkvError` where this one sees other devices than planned, or than the others.

        Planned is `LRKV_LOCAL_DEVICES`. Starts the backend.
        """
        import jax

        planned = cluster_env.number(os.environ, "LRKV_LOCAL_DEVICES", 1)
        with self.together():
            try:
                here, all_devices = jax.local_devices(), jax.devices()
            except (RuntimeError, AssertionError) as error:  # the latter where no GPU is visible
                reason = str(error) and _one_line(error) or "none is visible: see JAX_PLATFORMS"
                text = f"the devices do not start: {reason}"
                raise LrkvError(text, EXIT_UNAVAILABLE) from error
            seen = Counter(device.process_index for device in all_devices)
            wanted, source = max(seen.values()), "another process sees"
            if planned is not None:
                wanted, source = planned, "LRKV_LOCAL_DEVICES plans"
            if len(here) != wanted:
                raise LrkvError(
                    f"{socket.gethostname()} sees {len(here)} {here[0].device_kind} devices, and "
                    f"{source} {wanted}: repair or leave out the host, or plan for what it has",
                    EXIT_UNAVAILABLE,
                )

    def without_access_to(self, directory: Path) -> list[str]:
        """The names of the processes that do not see what process 0 writes in a directory."""
        if self.count == 1:
            return []
        path = directory / f".seen-by-all-{self.exchange(secrets.token_hex(8))[0]}"
        with self.together():
            if self.index == 0:
                path.touch()
        deadline = time.monotonic() + _APPEAR_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            # Listing a directory renews what a network file system remembers of it.
            with contextlib.suppress(OSError):
                os.listdir(directory)
            time.sleep(0.1)
        seen = self.exchange(path.exists())
        if self.index == 0:
            path.unlink(missing_ok=True)
        return [self.name(process) for process, saw in enumerate(seen) if not saw]


# This process's place, for callers that are not passed it.
HERE = Processes()


def _check_port(coordinator: str) -> None:
    """Raise `LrkvError` if process 0 cannot listen: JAX's service then crashes now and then."""
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        raise LrkvError(
            f"process 0 cannot listen at port {port} ({error}): set another in LRKV_COORDINATOR",
            EXIT_UNAVAILABLE,
        ) from error


def _warn_later(place: cluster_env.ClusterEnv, seconds: int) -> threading.Timer:
    """A timer that writes on stderr what this process waits for, unless it is cancelled before."""
    text = (
        f"lrkv: process {place.process} of {place.processes} ({place.launcher}) waits for the "
        f"others at {place.coordinator}, up to {seconds} s (LRKV_JOIN_SECONDS)"
    )
    timer = threading.Timer(_WAIT_SECONDS, print, [text], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    return timer


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, LrkvError) else f"{type(error).__name__}: {text[:300]}"
