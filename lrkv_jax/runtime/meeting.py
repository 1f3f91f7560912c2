"""All processes of a run meet at process 0 before JAX's own service starts there.

That service ends a process that it cannot reach, or that it did not expect, with a C++ abort and
no line that says why. So the processes first tell each other who they are over plain TCP
connections to the same port: what is wrong is then known everywhere, in words. When the last one is
there, process 0 stops listening, so that JAX's service can; the connections stay open.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from importlib.metadata import version

from lrkv_jax.errors import LrkvError
from lrkv_jax.runtime.hosts import Place

_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 10  # for a connection to say who it is
_LINE_BYTES = 1 << 20

Calls = dict[int, socket.socket]


def meet(place: Place, *, seconds: float) -> tuple[list[str], Calls]:
    """The host name of every process, in order, once all are there, and the open connections.

    Process 0 has one to each other process, by number; the others have one to process 0.

    Raises `LrkvError`, in every process that has come, for one that did not within `seconds`, for
    two that are the same, and for other counts or versions of JAX. Raises it here if process 0
    cannot be reached or its port is taken.
    """
    return (_host if place.process == 0 else _visit)(place, seconds)


def _hello(place: Place) -> dict:
    return {
        "process": place.process,
        "processes": place.processes,
        "host": socket.gethostname(),
        "jax": version("jax"),
    }


def _host(place: Place, seconds: float) -> tuple[list[str], Calls]:
    """Process 0's part: wait for the others, and tell them how it ended."""
    deadline, error = time.monotonic() + seconds, None
    hellos, calls, server = {0: _hello(place)}, {}, _listen(place)
    with contextlib.ExitStack() as stack:
        try:
            with server:
                while len(hellos) < place.processes:
                    call, hello = _caller(server, deadline)
                    stack.enter_context(call)
                    _check(place, hellos, hello)
                    process = hello["process"]
                    hellos[process], calls[process] = hello, call
        except TimeoutError:
            missing = [str(p) for p in range(place.processes) if p not in hellos]
            error = (
                f"process {', '.join(missing)} of {place.processes} did not come to "
                f"{place.coordinator} within {seconds:.0f} s: see its own output, or wait "
                "longer with LRKV_JOIN_SECONDS"
            )
        except LrkvError as wrong:
            calls[-1] = call  # it hears what is wrong with it, too
            error = str(wrong)
        hosts = [hellos[p]["host"] for p in sorted(hellos)]
        _answer(calls.values(), {"error": error, "hosts": hosts})
        if error:
            raise LrkvError(error)
        stack.pop_all()
    return hosts, calls


def _listen(place: Place) -> socket.socket:
    port = int(place.coordinator.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=place.processes
        )
    except OSError as error:
        raise LrkvError(
            f"port {port} of process 0 on {socket.gethostname()} cannot be opened "
            f"({error.strerror}): set another in LRKV_COORDINATOR"
        ) from error


def _caller(server, deadline: float) -> tuple[socket.socket, dict]:
    """The next connection that says who it is; others are dropped. Raises `TimeoutError`."""
    while True:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        call, _ = server.accept()
        call.settimeout(_HELLO_SECONDS)
        try:
            hello = json.loads(_line(call))
            hello["process"], hello["processes"], hello["host"], hello["jax"]
        except (OSError, ValueError, KeyError, TypeError):
            call.close()  # a port scan, or a program that takes this for another service
            continue
        return call, hello


def _check(place: Place, hellos: dict[int, dict], hello: dict) -> None:
    name = f"process {hello['process']} on {hello['host']}"
    if hello["processes"] != place.processes:
        raise LrkvError(
            f"{name} counts {hello['processes']} processes, and process 0 {place.processes}: "
            "start all with the same count"
        )
    before = hellos.get(hello["process"])
    # A process that was started again replaces itself; its first connection is dead.
    if before is not None and (hello["process"] == 0 or before["host"] != hello["host"]):
        raise LrkvError(
            f"two processes are number {hello['process']}, on {before['host']} and on "
            f"{hello['host']}: give each its own"
        )
    if hello["jax"] != hellos[0]["jax"]:
        raise LrkvError(
            f"{name} has jax {hello['jax']}, and process 0 {hellos[0]['jax']}: install one version"
        )


def _answer(calls, verdict: dict) -> None:
    """Send the verdict and wait until each has heard it, or has hung up."""
    line = json.dumps(verdict).encode() + b"\n"
    for call in calls:
        with contextlib.suppress(OSError):
            call.settimeout(_HELLO_SECONDS)
            call.sendall(line)
    for call in calls:
        with contextlib.suppress(OSError):
            call.recv(1)


def _visit(place: Place, seconds: float) -> tuple[list[str], Calls]:
    """Another process's part: say who it is, and wait for the verdict."""
    deadline = time.monotonic() + seconds
    host, _, port = place.coordinator.rpartition(":")
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with contextlib.ExitStack() as stack:
                address = host.strip("[]"), int(port)
                call = stack.enter_context(socket.create_connection(address, timeout=5))
                call.sendall(json.dumps(_hello(place)).encode() + b"\n")
                # Process 0 may wait for others as long as we would for it.
                call.settimeout(seconds + _HELLO_SECONDS)
                verdict = json.loads(_line(call))
                if verdict["error"]:
                    raise LrkvError(verdict["error"])
                call.sendall(b"!")
                stack.pop_all()
            return verdict["hosts"], {0: call}
        except (OSError, ValueError) as error:
            # Not up yet, not in the name service yet, or the port's last user is going away.
            reason = getattr(error, "strerror", None) or str(error) or "no answer"
            time.sleep(_RETRY_SECONDS)
    raise LrkvError(
        f"process {place.process} on {socket.gethostname()} cannot reach process 0 at "
        f"{place.coordinator} within {seconds:.0f} s ({reason}): see process 0's output; "
        "LRKV_COORDINATOR names another address, LRKV_JOIN_SECONDS a longer wait"
    )


def _line(call: socket.socket) -> bytes:
    """Bytes up to a newline."""
    received = b""
    while not received.endswith(b"\n"):
        part = call.recv(4096)
        if not part or len(received) > _LINE_BYTES:
            raise ValueError("the connection ended before its line did")
        received += part
    return received
