"""What is in force on this machine: found by trying to break out, once, never assumed."""

import functools
import json
import logging
import os
import select
import socket
import sys
import tempfile
from dataclasses import asdict, dataclass

from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.sandbox import launch
from lrkv_jax.evaluation.sandbox.launch import SandboxLimits

_log = logging.getLogger("lrkv_jax.evaluation")

# Small, for the probe meets them all. Its forks only sleep, and it stops at four times its limit.
_LIMITS = SandboxLimits(seconds=10, file_bytes=1 << 19, disk_bytes=1 << 20, processes=4)
# %r: a dictionary of what the program shall try to reach
_PROBE = """
import json, os, signal, socket, time
there, found = %r, {}

def works(act):
    try:
        act()
    except OSError:
        return False
    return True

def connect():
    socket.create_connection(("127.0.0.1", there["tcp"]), 2).close()

def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(b"out", ("127.0.0.1", there["udp"]))

def fill(name):
    with open(name, "wb") as file:
        file.write(bytes(there["file_bytes"]))

found["files"] = not works(lambda: open(there["file"]).close())
works(connect)
works(send)
found["network"] = not works(lambda: socket.socket(socket.AF_VSOCK).close())
found["disk"] = not all(works(lambda n=n: fill(str(n))) for n in range(4))
found["own_processes"] = os.getpid() < 10
children = []
try:
    while len(children) < 4 * there["processes"]:
        child = os.fork()
        if not child:
            time.sleep(60)
        children.append(child)
except OSError:
    pass
found["processes"] = len(children) < there["processes"]
for child in children:
    os.kill(child, signal.SIGKILL)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Isolation:
    """What isolates a program here, in addition to the limits and the session, which always do.

    way: "namespaces" or "limits". files: it reads nothing of the machine's but the
    standard and system libraries. network: it reaches no address, and makes no vsock socket. disk:
    all that it writes together is bounded, not only each file. processes: their number is bounded.
    own_processes: it sees none but its own, and none of them outlives it.
    """

    way: str
    files: bool
    network: bool
    disk: bool
    processes: bool
    own_processes: bool

    def as_dict(self) -> dict[str, str | bool]:
        return asdict(self)


@functools.cache
def isolation() -> Isolation:
    """Return the strongest isolation that works here; it is tried once per process and logged.

    Raises LrkvError where not even the least works: Linux, limits, and a bound on processes.
    """
    if sys.platform != "linux":
        raise LrkvError("model-written code runs only on Linux: evaluate HumanEval there")
    refused = []
    for way in ("namespaces", "limits"):
        try:
            found = probe(way)
        except LrkvError as error:
            refused.append(f"{way}: {error}")
            continue
        if not found.processes:
            raise LrkvError(
                "nothing bounds the number of processes here, so model-written code does not run: "
                "be another user than root, or allow user namespaces"
            )
        open_doors = [name for name, shut in found.as_dict().items() if shut is False]
        for reason in refused:
            _log.warning("sandbox: %s", reason)
        level = logging.WARNING if open_doors else logging.INFO
        _log.log(level, "sandbox: %s; not isolated: %s", way, ", ".join(open_doors) or "nothing")
        return found
    raise LrkvError(f"no sandbox for model-written code works here ({'; '.join(refused)})")


def probe(way: str) -> Isolation:
    """Try each way out of `way` from inside. Raises LrkvError where `way` does not work."""
    with (
        tempfile.NamedTemporaryFile(prefix="lrkv-probe-") as file,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        os.chmod(file.name, 0o644)  # any process of the machine may read it
        udp.bind(("127.0.0.1", 0))
        targets = {"file": file.name, "tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        bounds = {key: getattr(_LIMITS, key) for key in ("processes", "file_bytes")}
        outcome = launch.run(_PROBE % {**targets, **bounds}, _LIMITS, way)
        if not outcome.passed:
            raise LrkvError(f"its probe {outcome.reason}: {outcome.output[-300:]}")
        # In a network of its own it may send; what counts is whether anything comes.
        reached, _, _ = select.select([tcp, udp], [], [], 0)
    found = json.loads(outcome.output.splitlines()[-1])
    found["network"] &= not reached
    return Isolation(way=way, **found)
