"""A process that answers one job after another: a hang or a crash ends it alone.

`Child` is the parent's side; `python -m MODULE` is the process, and calls `answer_jobs`.
Jobs, news and answers go through pipes, as JSON lines. The process ends with its input,
and so does not outlive a parent that was killed, even while a job hangs. It is no fork of
one that may hold JAX, and imports nothing of the caller's main module.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

News = Callable[[Any], None]


class ChildEnded(Exception):
    """The process ended early; the text says how, and the last that it printed."""


class Child:
    """The process `python -m module`; use as a context manager, which ends it.

    `environment` is all of the process's; jobs, news and answers are of JSON's types.
    """

    def __init__(self, module: str, environment: Mapping[str, str]):
        self._module, self._environment = module, environment
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None:
            return
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lines = lines
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module], env=self._environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed,
            start_new_session=True,
        )  # fmt: skip

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def ask(self, job: Any, news: News, seconds: float | None = None) -> Any:
        """The answer to a job; `news` is called with each report of how far it is.

        Raises `ChildEnded` where the process ends first, and `TimeoutError` where it does not
        answer within `seconds`: it is ended then, with what it has started.
        """
        process, lines, began = self._process, self._lines, time.monotonic()
        if process is None:
            raise ChildEnded("was ended before")
        with contextlib.suppress(BrokenPipeError):  # its end is reported below
            print(json.dumps(job), file=process.stdin, flush=True)
        while True:
            left = None if seconds is None else max(0.0, began + seconds - time.monotonic())
            try:
                line = lines.get(timeout=left)
            except queue.Empty:
                self.end()
                raise TimeoutError from None
            if line is None:
                raise ChildEnded(self._death(process))
            kind, said = json.loads(line)
            if kind == "answer":
                return said
            news(said)

    def end(self) -> None:
        """Kill the process and those it started; what the kernel keeps is left to it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)

    def _death(self, process: subprocess.Popen[str]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        self.end()
        how = f"ended with {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            how += ", as by too little memory" if -code == signal.SIGKILL else ""
        self._printed.seek(0)
        words = [line.strip() for line in self._printed if line.strip()]
        return f"{how}; {words[-1][:160]}" if words else how


def answer_jobs(answer: Callable[[Any, News], Any]) -> None:
    """Answer the jobs on standard input with `answer(job, news)`, until it ends."""
    # Whatever a library prints must not be taken for an answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)

    def tell(kind: str, said: Any) -> None:
        try:
            print(json.dumps([kind, said]), file=out, flush=True)
        except BrokenPipeError:  # the parent is gone
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        tell("answer", answer(json.loads(jobs.get()), functools.partial(tell, "news")))
