"""SIGINT, SIGTERM and the end of the time: after which step every process stops.

A second signal ends the process at once, in whatever it is: what is being saved has no number yet.

A process alone stops at the end of its step. Of several, a scheduler may tell one only, and each
runs ahead of its devices by a step or two: they must agree on a step that none has passed. A
thread in each asks the coordination service once a second whether somebody was told to stop. When
somebody was, every process holds its loop back for the moment that it takes to exchange step
numbers; the step after the highest is the last. No step pays for this: the loop takes a lock that
is free.

JAX's `reached_preemption_sync_point` does the same and is not used: Orbax calls it from a thread of
its own with the steps that it saves, which sets the count of steps back, and what arrives before
the first step of a resumed run is agreed to be at step 1 and never reached.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time

from lrkv_jax.runtime import processes

POLL_SECONDS = 1.0
# Some launchers pass on what the scheduler sends to all, so that one signal comes twice.
BOUNCE_SECONDS = 0.5

_names = itertools.count()


class Stopping:
    """Use as a context manager around the loop; in several processes around the same one.

    `signal` is the number of the signal that was noticed, here or elsewhere, or None. With a
    `deadline`, of `time.monotonic`, the first step that ends after it is the last.
    """

    def __init__(self, start_step: int, *, deadline: float | None = None):
        self.signal: int | None = None
        self._deadline = deadline
        self._step = start_step
        self._last: int | None = None
        self._alone = processes.count() == 1
        self._name = f"lrkv/stopping/{next(_names)}"
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._restore = lambda: None
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Stopping:
        self._catch()
        if not self._alone:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._restore()
        if self._watcher is not None:
            if kind is None:
                # Whoever is told to stop now still finds the others' threads there to answer.
                processes.wait_for_all(f"{self._name}/over")
            self._over.set()
            self._watcher.join(timeout=2 * POLL_SECONDS)

    def after(self, step: int) -> bool:
        """Whether the run stops after this step. To be asked after every step."""
        if self._alone:
            return self._told()
        with self._lock:
            self._step = step
            return self._last == step

    def _told(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return self.signal is not None or late

    def _catch(self) -> None:
        """Note signals from now on; outside the main thread they are the caller's."""
        if threading.current_thread() is not threading.main_thread():
            return

        def note(number, frame):
            self.signal = number

        numbers = (signal.SIGINT, signal.SIGTERM)
        old = {number: signal.signal(number, note) for number in numbers}
        # A handler runs when the main thread is back from what it called, a step of minutes
        # perhaps. Python writes the number to this pipe at once, and a thread reads it.
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=_end_at_the_second, args=(read, numbers), daemon=True).start()

        def restore() -> None:
            signal.set_wakeup_fd(before)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(write)

        self._restore = restore

    def _watch(self) -> None:
        client, told = processes.client(), False
        while not self._over.wait(POLL_SECONDS):
            if self._told() and not told:
                told = True
                number = int(self.signal or 0)  # 0: the time is over
                client.key_value_set(f"{self._name}/told/{processes.index()}", str(number))
            answers = client.key_value_dir_get(f"{self._name}/told/")
            if answers:
                # The loop cannot pass a step while this is held, here or in any process.
                with self._lock:
                    self._last = self._agree(client)
                self.signal = self.signal or int(answers[0][1]) or None
                return

    def _agree(self, client) -> int:
        client.key_value_set(f"{self._name}/step/{processes.index()}", str(self._step))
        processes.wait_for_all(f"{self._name}/steps")
        steps = client.key_value_dir_get(f"{self._name}/step/")
        return max(int(step) for _, step in steps) + 1


def _end_at_the_second(read: int, numbers: tuple[int, ...]) -> None:
    """Read signals as they come; exit at the second one. Ends when the pipe is closed."""
    first = None
    with contextlib.closing(os.fdopen(read, "rb", buffering=0)) as pipe:
        while number := pipe.read(1):
            if number[0] not in numbers:
                continue
            now = time.monotonic()
            if first is not None and now - first > BOUNCE_SECONDS:
                print("lrkv: second signal: ended at once, nothing saved", file=sys.stderr)
                processes.leave(128 + number[0])
            first = first or now
