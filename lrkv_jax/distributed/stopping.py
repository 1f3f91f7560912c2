"""SIGINT, SIGTERM, SIGHUP and the end of the time: when a run ends, and after which step.

Before the first step, and whenever nothing has to be saved, a signal ends the process at once, in
whatever it is: everything on the disk is as after a kill, which a run survives, and XLA's threads
are not waited for. While steps are taken, the first signal ends the run after a step that is then
saved. A second one ends the process at once; what is being saved has no number yet.

A process alone stops at the end of its step, or of a batch of a validation. Of several, a scheduler
may signal only one, and each runs ahead of its devices by a step or two: they must agree on a place
that none has passed. All ask at the same places, in the same order, so each counts its questions. A
thread in each polls the coordination service once a second for a signal to any of them. When one
was, every process holds its loop back for the moment that it takes to exchange the counts; all stop
at the question after the highest. No step pays for this: the loop takes a lock that is free.

JAX's `reached_preemption_sync_point` does the same and is not used: what arrives before the first
step of a resumed run is agreed to be at step 1 and never reached.

Importing this module does not import JAX, so that a command can catch signals from its start on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from lrkv_jax.distributed.processes import HERE, Processes
from lrkv_jax.errors import EXIT_START_AGAIN

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 1.0
# Some launchers pass on what the scheduler sends to all, so that one signal comes twice.
BOUNCE_SECONDS = 0.5


def caught() -> list[int]:
    """The signals that end this process in order; what nohup has set to be ignored stays so."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in SIGNALS if not (n == signal.SIGHUP and ignored)]


class Stopping:
    """Use as a context manager around everything that signals are to end in order.

    Within it a signal ends the process with exit code 75 (start again), except under `hold`. With a
    `deadline`, of `time.monotonic`, the first step that ends after it is the last. `signal` is the
    number of the signal that was noticed under `hold`, here or in another process, or None.
    """

    def __init__(self, *, deadline: float | None = None, processes: Processes = HERE):
        self.signal: int | None = None
        self.processes = processes
        self._deadline = deadline
        self._request: StopRequest | None = None
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # elsewhere they are the caller's
            self._restore = self._catch()
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    @contextlib.contextmanager
    def hold(self, warn: Callable[[str], None] = lambda text: None) -> Iterator[StopRequest]:
        """Note signals for the loop instead; in several processes around the same one.

        Yields an object whose `here()`, to be called wherever the loop may stop, is true where it
        must. `warn` is called once with what a signal leads to, from any thread.
        """
        request = self._request = StopRequest(self, warn)
        try:
            with request:
                yield request
        finally:
            self._request = None

    def due(self) -> bool:
        """Whether a signal came, or the deadline has passed."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        return self.signal is not None or late

    def _catch(self) -> Callable[[], None]:
        """Notice signals from now on; returns what undoes it."""

        numbers = caught()
        # A handler would run when the main thread is back from what it called, a step of minutes
        # perhaps. Python writes the number to this pipe at once, and a thread reads it. While there
        # is a handler that ignores signals, there is the pipe: none is lost.
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        old = {number: signal.signal(number, _ignore) for number in numbers}
        threading.Thread(target=self._listen, args=(read, numbers), daemon=True).start()

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(write)

        return restore

    def _listen(self, read: int, numbers: list[int]) -> None:
        """Read signals as they come. Ends when the pipe is closed."""
        first = None
        with contextlib.closing(os.fdopen(read, "rb", buffering=0)) as pipe:
            while number := pipe.read(1):
                if number[0] not in numbers:
                    continue
                request, now = self._request, time.monotonic()
                if request is None:
                    name = signal.Signals(number[0]).name
                    text = f"ended by {name} with nothing to save: the same command resumes"
                    self._end_now(EXIT_START_AGAIN, text)
                if first is None:
                    first, self.signal = now, number[0]
                    request.announce(number[0])
                elif now - first > BOUNCE_SECONDS:
                    self._end_now(128 + number[0], "second signal: ended at once, nothing saved")

    def _end_now(self, code: int, text: str) -> None:
        """Print the reason on stderr and exit, past every lock that another thread may hold."""
        with contextlib.suppress(OSError, ValueError):
            # A bar on a terminal has hidden the cursor and does not come to its end.
            if sys.__stdout__.isatty():
                os.write(1, b"\x1b[?25h\n")
        with contextlib.suppress(OSError):
            os.write(2, f"lrkv: {self.processes.who()}{text}\n".encode())
        self.processes.leave(code)


def _ignore(number, frame) -> None:
    """Python writes to the wakeup pipe only for signals that have a handler."""


class StopRequest:
    """The agreement of a run's processes on where they stop."""

    def __init__(self, stopping: Stopping, warn: Callable[[str], None]):
        self._processes, self._stopping, self._warn = stopping.processes, stopping, warn
        self._asked = 0  # how often this process has called `here`
        self._last: int | None = None
        self._alone = self._processes.count == 1
        self._name = self._processes.topic("stopping")
        self._lock = threading.Lock()
        self._over, self._announced = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> StopRequest:
        if not self._alone:
            self._watcher.start()
        return self

    def __exit__(self, kind, *_) -> None:
        if not self._alone:
            if kind is None:
                # Whoever is signalled now still finds the others' threads there to answer.
                self._processes.wait_for_all(f"{self._name}/over")
            self._over.set()
            self._watcher.join(timeout=2 * POLL_SECONDS)

    def here(self) -> bool:
        """Whether the run stops here, as all processes, which ask in the same places, agree."""
        if self._alone:
            return self._stopping.due()
        with self._lock:
            self._asked += 1
            return self._last is not None and self._asked >= self._last

    def announce(self, number: int) -> None:
        """Warn that a signal was noticed; it may take a step of minutes until more happens."""
        if self._announced.is_set():
            return
        self._announced.set()
        what = f"{signal.Signals(number).name}: " if number else "the time is over: "
        self._warn(f"{what}finishing the step, then saving (a second signal ends at once)")

    def _watch(self) -> None:
        client, stopping, published = self._processes.client, self._stopping, False
        while not self._over.wait(POLL_SECONDS):
            if stopping.due() and not published:
                published = True
                number = int(stopping.signal or 0)  # 0: the time is over
                client.key_value_set(f"{self._name}/signals/{self._processes.index}", str(number))
            answers = client.key_value_dir_get(f"{self._name}/signals/")
            if answers:
                # The loop cannot ask again while this is held, here or in any process.
                with self._lock:
                    self._last = self._agree(client)
                number = int(answers[0][1])
                stopping.signal = stopping.signal or number or None
                self.announce(number)
                return

    def _agree(self, client) -> int:
        client.key_value_set(f"{self._name}/asked/{self._processes.index}", str(self._asked))
        self._processes.wait_for_all(f"{self._name}/counted")
        counts = client.key_value_dir_get(f"{self._name}/asked/")
        return max(int(count) for _, count in counts) + 1
