"""The process that becomes the program: gives up what it may not have, runs it, proves its end."""

import os
import resource
import sys

import system

REPORT = 3  # closed before the program begins
PROOF = 4  # the only one open, except for 0, 1 and 2
ALL_DESCRIPTORS = 1 << 20


def proof_of(key: bytes) -> bytes:
    """The bytes that this process writes only if the program came to its end."""
    return bytes(byte ^ 0x55 for byte in key)


def become(order: dict, key: bytes, proof_pipe: int) -> None:
    """Run the program of `order` and end this process."""
    os.dup2(proof_pipe, PROOF)
    os.closerange(PROOF + 1, ALL_DESCRIPTORS)
    os.setsid()  # what it sends to its group reaches nobody else
    system.die_with_parent()
    system.forbid_vsock()
    _limit(order["limits"])
    os.write(REPORT, b"starts\n")
    os.close(REPORT)
    _run(order["program"], key)


def _limit(limits: dict) -> None:
    def at_most(what: int, value: float) -> None:
        # A container's limit may be lower; it stays.
        hard = resource.getrlimit(what)[1]
        value = -int(-value // 1)  # up to a whole number
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # SIGXCPU comes at the first, and names the cause; SIGKILL, at the second.
        last = value + 1 if what == resource.RLIMIT_CPU and value != hard else value
        resource.setrlimit(what, (value, last))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_CPU, limits["cpu_seconds"])
    at_most(resource.RLIMIT_FSIZE, limits["file_bytes"])
    at_most(resource.RLIMIT_NOFILE, limits["open_files"])
    at_most(resource.RLIMIT_NPROC, limits["processes"] + 1)  # with the supervisor
    at_most(resource.RLIMIT_AS, limits["memory_bytes"])


def _run(source: str, key: bytes) -> None:
    # Held before the program can replace them.
    write, leave, pid, prove, output = os.write, os._exit, os.getpid, proof_of, sys.stdout
    show = sys.__excepthook__
    own = pid()
    main = type(sys)("__main__")
    for mine in ("program", "system", "namespaces"):
        sys.modules.pop(mine, None)
    os.environ.clear()
    sys.modules["__main__"], sys.argv, sys.path = main, ["program.py"], sys.path[1:]
    try:
        exec(compile(source, "program.py", "exec"), main.__dict__)
        # The program's process never holds the proof, only what it is made of, until here.
        result = prove(key)
    except MemoryError:
        result = b"ran out of memory"
    except SystemExit:
        result = b""
    except BaseException as error:
        result = b"raised " + type(error).__name__.encode()[:100]
        try:  # noqa: SIM105 (a program may have closed or replaced what this writes to)
            show(type(error), error, error.__traceback__.tb_next)
        except BaseException:
            pass
    try:  # noqa: SIM105
        output.flush()
    except BaseException:
        pass
    if pid() == own:  # a forked child that comes to the end proves nothing
        write(PROOF, result)
    leave(0)
