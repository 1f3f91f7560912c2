"""The supervisor: builds the isolation, starts the program behind it, and says how it ended.

Run as `python -I -S -B FOLDER`, with an order on its input (launch.py). Two lines go to the
descriptor `report`: "starts", and "ended PASSED SECONDS REASON". Imports little: it starts often.
"""

import contextlib
import marshal
import os
import signal
import sys
import time

import namespaces
import program
import system


def main() -> None:
    order = marshal.loads(sys.stdin.buffer.read())
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(order["report"], program.REPORT)
    os.closerange(program.REPORT + 1, program.ALL_DESCRIPTORS)
    system.die_with_parent()
    if os.getppid() != order["parent"]:
        sys.exit("the process that asked for this has ended")
    user = order["user"]  # None: the one who asked
    if order["way"] == "namespaces":
        namespaces.enter(order, as_root=user is not None)
    elif order["way"] == "limits" and user is not None:
        os.chown(".", user, user)
    others = 1  # whom else the limit on processes counts
    if order["way"] == "limits" and user is None:
        others = _tasks_of(os.geteuid())
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    system.drop_capabilities()
    system.die_with_parent()  # changing the user undid it
    system.hide_from_debuggers()
    system.adopt_orphans()
    passed, seconds, reason = _supervise(order, others)
    os.write(program.REPORT, f"ended {passed:d} {seconds} {reason}\n".encode())
    os._exit(0)


def _supervise(order: dict, others: int) -> tuple[bool, float, str]:
    reading, writing = os.pipe()
    key = os.urandom(32)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    began = time.monotonic()
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        program.become(order, key, writing, others)
    os.close(writing)
    status = _wait(child, began + order["limits"]["seconds"])
    seconds = time.monotonic() - began
    _end_descendants(child)
    os.set_blocking(reading, False)
    try:
        proof = os.read(reading, 4096)
    except BlockingIOError:  # something outlived that, holds the pipe, and nobody wrote
        proof = b""
    passed = status == 0 and proof == program.proof_of(key)
    return passed, seconds, _reason(status, proof, passed)


def _wait(child: int, deadline: float) -> int | None:
    """Return the wait status of `child`, or None at the deadline; other children are reaped."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid:
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        signal.sigtimedwait({signal.SIGCHLD}, left)


def _reason(status: int | None, proof: bytes, passed: bool) -> str:
    if passed:
        return "passed"
    if status is None:
        return "timed out"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return "used up its processor time"
        return f"killed by {signal.Signals(number).name}"
    if proof.startswith((b"raised ", b"ran out of memory")):
        return " ".join(proof.decode(errors="replace").split())
    return "ended without passing"


def _end_descendants(child: int) -> None:
    """Kill everything that the program left; a process namespace does so too."""
    # All at once, or a fork bomb is faster than what kills its processes one by one.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    children = f"/proc/self/task/{os.getpid()}/children"
    while os.path.exists(children):  # those that left the group, too
        with open(children) as file:
            pids = [int(pid) for pid in file.read().split()]
        if not pids:
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _tasks_of(user: int) -> int:
    """The number of the user's threads, each of which counts towards the limit on processes."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # it has ended, or is hidden
    return total


if __name__ == "__main__":
    main()
