"""Starts one program in the sandbox and waits for it; a process that holds JAX is not forked."""

import contextlib
import functools
import marshal
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lrkv_jax.distributed.hardware import usable_cores
from lrkv_jax.errors import LrkvError

INSIDE = Path(__file__).parent / "inside"
# For starting the interpreter and building the isolation, on a machine that does much else.
START_SECONDS = 30.0
_FIRST_USER = 2_000_000_000
_KEPT = ["LD_LIBRARY_PATH"]
_TAIL = 2000  # characters of output that an outcome keeps
_MIB = 1 << 20


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use; the kernel holds all but `seconds` and `output_bytes`.

    seconds: of wall clock, from its first statement. cpu_seconds, memory_bytes (of address space),
    file_bytes (one file's size), open_files: of each process. processes: how many processes and
    threads at a time, itself included. disk_bytes: of all its files together. output_bytes: of
    stdout and stderr together. Raises LrkvError for one that is not above 0.
    """

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 1024 * _MIB
    file_bytes: int = 16 * _MIB
    disk_bytes: int = 64 * _MIB
    open_files: int = 64
    processes: int = 8
    output_bytes: int = _MIB

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise LrkvError(f"sandbox: {field.name} = {value}: give a number above 0")


@dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program.

    passed: it came to its end without raising. reason: "passed", "timed out", "raised
    NameError", "ran out of memory", "ended without passing", ... seconds: wall clock of
    the program alone. output: the end of what it wrote to stdout and stderr.
    """

    passed: bool
    reason: str
    seconds: float
    output: str


def run_programs(
    programs: Sequence[str], *, limits: SandboxLimits | None = None
) -> list[ProgramOutcome]:
    """Run Python programs on the standard library alone, one on each core.

    Outcomes are in the programs' order. Raises LrkvError where no sandbox works on this
    machine (`check_sandbox`).
    """
    if isinstance(programs, str | bytes):
        raise LrkvError("run_programs takes a list of programs: give [program]")
    check_sandbox()
    limits = limits or SandboxLimits()
    pool = ThreadPoolExecutor(usable_cores(), thread_name_prefix="sandbox")
    try:
        return list(pool.map(lambda program: run(program, limits), programs))
    finally:
        # Interrupted, it ends after the programs that run, not after all of them.
        pool.shutdown(cancel_futures=True)


@functools.cache
def check_sandbox() -> None:
    """Raise LrkvError where this machine has no sandbox; it is tried once per process."""
    if sys.platform != "linux":
        raise LrkvError("model-written code runs only on Linux: evaluate HumanEval there")
    run("pass", SandboxLimits())


def run(program: str, limits: SandboxLimits) -> ProgramOutcome:
    """Run one program in namespaces that hold only the standard library.

    The interpreter starts by vfork and exec, with an empty environment and in a new session;
    it sets the limits on itself before it becomes the program. All that was started is killed
    before this returns. Raises LrkvError where the sandbox could not be built.
    """
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="lrkv-sandbox-", ignore_cleanup_errors=True) as root,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as report,
    ):
        # Isolated from the environment and the user's folder, without site-packages,
        # writing no .pyc.
        process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(INSIDE)],
            stdin=subprocess.PIPE,
            # A file, which the limit on a file's size bounds.
            stdout=output,
            stderr=subprocess.STDOUT,
            # Some interpreters start only with it; the program's environment is empty.
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            cwd=root,
            start_new_session=True,
            pass_fds=[report.fileno()],
        )
        order = {
            "program": program,
            "limits": asdict(limits),
            "root": root,
            "readable": readable(),
            "report": report.fileno(),
            "parent": os.getpid(),
            # A separate user: its processes are counted separately, and it owns no files.
            "user": _FIRST_USER + process.pid if _is_root_of_machine() else None,
        }
        late = False
        with process:
            try:
                process.communicate(marshal.dumps(order), START_SECONDS + limits.seconds)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                # What the supervisor left, whose group keeps the number.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        written = output.seek(0, os.SEEK_END)
        output.seek(max(0, written - 4 * _TAIL))
        text = output.read().decode(errors="replace")[-_TAIL:]
        report.seek(0)
        lines = report.read().decode().splitlines()
    seconds = time.monotonic() - began
    if lines[:1] != ["starts"]:
        why = "it was too slow" if late else (text.strip() or "no output").splitlines()[-1]
        raise LrkvError(
            f"the sandbox for model-written code could not start ({why}): allow user namespaces "
            "(kernel.unprivileged_userns_clone, or the container's seccomp profile)"
        )
    if written > limits.output_bytes:
        return ProgramOutcome(False, "wrote too much output", seconds, text)
    if len(lines) == 1:  # the supervisor has ended
        return ProgramOutcome(False, "timed out" if late else "ended its supervisor", seconds, text)
    _, passed, measured, reason = lines[1].split(" ", 3)
    return ProgramOutcome(passed == "1", reason, float(measured), text)


def _is_root_of_machine() -> bool:
    """Whether this is root outside any user namespace, which no limit on processes binds."""
    users = Path("/proc/self/uid_map").read_text().split()
    return os.geteuid() == 0 and users == ["0", "0", str(2**32 - 1)]


def readable() -> list[str]:
    """Return what a program may read: the standard library and the system's shared libraries."""
    # Not the virtual environment, which holds more than the standard library.
    platform = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    paths = [sysconfig.get_path("stdlib"), platform, str(INSIDE)]
    paths += ["/usr/lib", "/usr/lib64", "/lib", "/lib64", str(Path(sys.base_prefix, "lib"))]
    there = sorted({path for path in paths if os.path.isdir(path)})
    # A folder brings what is in it.
    return [p for p in there if not any(p.startswith(other + "/") for other in there)]
