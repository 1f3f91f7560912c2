"""Starts one program in the sandbox and waits for it; a process that holds JAX is not forked."""

import contextlib
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.sandbox.limits import Limits, Outcome

INSIDE = Path(__file__).parent / "inside"
# For starting the interpreter and building the walls, on a machine that does much else.
START_SECONDS = 30.0
_FIRST_USER = 2_000_000_000
_KEPT = ["LD_LIBRARY_PATH"]
_TAIL = 2000  # characters of output that an outcome keeps


def run(program: str, limits: Limits, way: str) -> Outcome:
    """Run `program` behind the walls of `way`: "bubblewrap", "namespaces" or "limits".

    The interpreter starts by vfork and exec, with an empty environment and in a session of its own;
    it sets the limits on itself before it becomes the program. All that was started is killed
    before this returns; without a process namespace, as far as it is found. Raises LrkvError where
    the sandbox could not be built.
    """
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="lrkv-sandbox-", ignore_cleanup_errors=True) as root,
        contextlib.ExitStack() as open_pipes,
    ):
        reading, writing = os.pipe()
        report = open_pipes.enter_context(open(reading, "rb", buffering=0))
        # Closed as soon as the other side has it, or its end would never be seen here.
        with open(writing, "wb", buffering=0):
            process = subprocess.Popen(
                _command(way, limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                # Some interpreters start only with it; the program's environment is empty.
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                cwd=root,
                start_new_session=True,
                pass_fds=[writing],
            )
        order = {
            "program": program,
            "limits": asdict(limits),
            "way": way,
            "root": root,
            "readable": readable(),
            "report": writing,
            "parent": os.getpid(),
            # Its processes are counted apart from everybody's, and it owns nothing.
            "user": _FIRST_USER + process.pid if _is_root_of_machine() else None,
        }
        with process:
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(marshal.dumps(order))
                process.stdin.close()
                output, lines, late = _listen(process.stdout, report, limits)
            finally:
                # The group's first process is not reaped yet, so the number is still its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    text = output[-4 * _TAIL :].decode(errors="replace")[-_TAIL:]
    return _outcome(lines, text, len(output) > limits.output_bytes, late, seconds)


def _outcome(lines: bytes, text: str, flooded: bool, late: bool, seconds: float) -> Outcome:
    said = lines.decode().splitlines()
    if said[:1] != ["starts"]:
        why = "it was too slow" if late else (text.strip() or "no output").splitlines()[-1]
        raise LrkvError(f"the sandbox for model-written code could not start: {why}")
    if len(said) == 1 and not flooded:  # the supervisor is gone, or its output is kept open
        return Outcome(False, "timed out" if late else "ended its supervisor", seconds, text)
    if flooded:
        return Outcome(False, "wrote too much output", seconds, text)
    _, passed, measured, reason = said[1].split(" ", 3)
    return Outcome(passed == "1", reason, float(measured), text)


def _listen(output, report, limits: Limits) -> tuple[bytes, bytes, bool]:
    """Return what came through both pipes until they ended, were too long, or time was up."""
    deadline = time.monotonic() + START_SECONDS + limits.seconds
    came = {output: bytearray(), report: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in came:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(came[output]), bytes(came[report]), True
            for key, _ in selector.select(left):
                part = os.read(key.fd, 65536)
                came[key.fileobj] += part
                if not part:
                    selector.unregister(key.fileobj)
                elif len(came[output]) > limits.output_bytes:
                    return bytes(came[output]), bytes(came[report]), False
    return bytes(came[output]), bytes(came[report]), False


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


def _command(way: str, limits: Limits) -> list[str]:
    # Isolated from the environment and the user's folder, without site-packages, writing no .pyc.
    python = os.path.realpath(sys.executable)
    inside = [python, "-I", "-S", "-B", str(INSIDE)]
    return [*_bubblewrap(python, limits), *inside] if way == "bubblewrap" else inside


def _bubblewrap(python: str, limits: Limits) -> list[str]:
    words = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"]
    words += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
    if _is_root_of_machine():
        # To leave root for a user of its own: the limit on processes does not bind root.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    paths = [*readable(), python]
    # Or they would be closed to all but root.
    devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
    above = {str(parent) for path in paths + devices for parent in Path(path).parents}
    for folder in sorted(above - {"/"}):
        words += ["--perms", "0755", "--dir", folder]
    for path in paths:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind", path, path]
    for device in devices:
        words += ["--dev-bind", device, device]
    words += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/lrkv-program"]
    return [*words, "--remount-ro", "/", "--chdir", "/lrkv-program", "--"]
