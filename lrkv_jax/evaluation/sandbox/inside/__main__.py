"""The supervisor: builds the isolation, starts the program inside it, and reports how it ended.

Run as `python -I -S -B FOLDER`, with an order on its input (launch.py). Two lines go to the
descriptor `report`: "starts", and "ended PASSED SECONDS REASON". Imports little: it starts often.
"""

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
    os.umask(0o022)  # under a stricter one of root's no program could read the standard library
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(order["report"], program.REPORT)
    os.closerange(program.REPORT + 1, program.ALL_DESCRIPTORS)
    system.die_with_parent()
    if os.getppid() != order["parent"]:
        sys.exit("the process that asked for this has ended")
    user = order["user"]  # None: the caller
    namespaces.enter(order, as_root=user is not None)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    system.drop_capabilities()
    system.die_with_parent()  # changing the user undid it
    system.hide_from_debuggers()
    passed, seconds, reason = _supervise(order)
    os.write(program.REPORT, f"ended {passed:d} {seconds} {reason}\n".encode())
    os._exit(0)  # and the kernel kills whatever the program left


def _supervise(order: dict) -> tuple[bool, float, str]:
    reading, writing = os.pipe()
    key = os.urandom(32)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    began = time.monotonic()
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        program.become(order, key, writing)
    os.close(writing)
    status = _wait(child, began + order["limits"]["seconds"])
    seconds = time.monotonic() - began
    os.set_blocking(reading, False)
    try:
        reply = os.read(reading, 4096)
    except BlockingIOError:  # something outlives it, holds the pipe, and nobody wrote
        reply = b""
    passed = status == 0 and reply == program.proof_of(key)
    return passed, seconds, _reason(status, reply, passed)


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


def _reason(status: int | None, reply: bytes, passed: bool) -> str:
    if passed:
        return "passed"
    if status is None:
        return "timed out"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return "used up its processor time"
        named = number in set(signal.Signals)  # most real-time signals are not
        return f"killed by {signal.Signals(number).name if named else f'signal {number}'}"
    if reply.startswith((b"raised ", b"ran out of memory")):
        return " ".join(reply.decode(errors="replace").split())
    return "ended without passing"


if __name__ == "__main__":
    main()
