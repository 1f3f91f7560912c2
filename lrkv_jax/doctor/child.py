"""The process in which checks run, so that one that hangs or crashes ends with a line.

`Child` is the doctor's side; `python -m lrkv_jax.doctor.child` is the process. It runs one check
after another, so that JAX is loaded once; after a check that hung or crashed a fresh process takes
over. Jobs and findings go through pipes, as JSON lines. The process ends with its input, and so
does not outlive a doctor that was killed, even while a check hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lrkv_jax.doctor import finding
from lrkv_jax.doctor.finding import SLOW, WRONG, Finding
from lrkv_jax.errors import LrkvError

AGAIN = "run it again on an idle machine, or with --seconds 300, once what is wrong is mended"


@dataclass(frozen=True)
class Check:
    """A function `module:name` of the arguments that gives a finding or a list of them.

    It may take `seconds`; `mend` is what to do where it does not end, crashes or raises, and where
    a finding that is slow or wrong names no other.
    """

    name: str
    function: str
    seconds: float
    mend: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Child:
    """Runs checks in a process of their own; use as a context manager, which ends it."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        self._end()
        self._said.close()

    def ask(self, check: Check, left: float = float("inf")) -> list[Finding]:
        """The findings of a check, of which the time `left` to the doctor may leave it less."""
        if left <= 0:
            return [Finding(check.name, SLOW, "not begun when the doctor's time was over", AGAIN)]
        if self._process is None:
            self._start()
        limit = min(check.seconds, left)
        deadline, begun = time.monotonic() + limit, ""
        job = {"name": check.name, "function": check.function, "mend": check.mend}
        with contextlib.suppress(BrokenPipeError):  # a process that has ended is reported below
            print(json.dumps(job | {"arguments": check.arguments}), file=self._process.stdin)
            self._process.stdin.flush()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._end()
                if limit < check.seconds:
                    says = f"not done when the doctor's time was over{begun}"
                    return [Finding(check.name, SLOW, says, AGAIN)]
                says = f"did not answer within {limit:.0f} s{begun}"
                return [Finding(check.name, WRONG, says, check.mend)]
            if line is None:
                return [Finding(check.name, WRONG, f"{self._death()}{begun}", check.mend)]
            said = json.loads(line)
            if "findings" in said:
                return [Finding(**one) for one in said["findings"]]
            begun = f" (last begun: {said['at']})"

    def _start(self) -> None:
        environment = dict(os.environ)
        if platforms := environment.get("JAX_PLATFORMS"):
            # The oracles run on the CPU.
            names = [*platforms.split(","), "cpu"]
            environment["JAX_PLATFORMS"] = ",".join(dict.fromkeys(names))
        # Beside other programs: what is not asked for is not taken.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self._said.truncate(0)
        self._lines = queue.SimpleQueue()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "lrkv_jax.doctor.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip

        lines = self._lines

        def read() -> None:
            with contextlib.suppress(ValueError):  # closed by `_end`
                for line in process.stdout:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def _death(self) -> str:
        """How the process ended by itself, and the last that it said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self._end()
        killed = code is not None and code < 0
        how = f"was ended by {signal.Signals(-code).name}" if killed else f"ended with {code}"
        if killed and -code == signal.SIGKILL:
            how += ", as by too little memory"
        self._said.seek(0)
        words = [line.strip() for line in self._said if line.strip()]
        return f"{how}; {words[-1][:160]}" if words else how

    def _end(self) -> None:
        """Kill the process and its own; one that the kernel does not let go is left to it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def answer(job: dict[str, Any]) -> list[Finding]:
    """The findings of a job; what its function raises becomes one."""
    module, _, name = job["function"].partition(":")
    try:
        found = getattr(importlib.import_module(module), name)(**job["arguments"])
    except LrkvError as error:
        return [Finding(job["name"], WRONG, str(error))]
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            text = f"too little memory: {text}"
        return [Finding(job["name"], WRONG, f"{type(error).__name__}: {text[:200]}", job["mend"])]
    found = found if isinstance(found, list) else [found]
    bad = (SLOW, WRONG)
    return [replace(f, mend=f.mend or job["mend"]) if f.verdict in bad else f for f in found]


def main() -> None:
    """Answer the jobs on standard input until it ends."""
    # Whatever a library prints must not be taken for findings.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)

    def tell(**what: Any) -> None:
        try:
            print(json.dumps(what), file=out, flush=True)
        except BrokenPipeError:
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    finding.news = lambda what: tell(at=what)
    while True:
        tell(findings=[asdict(one) for one in answer(json.loads(jobs.get()))])


if __name__ == "__main__":
    main()
