"""SIGINT and SIGTERM: after which step every process stops.

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

import itertools
import signal
import threading

from lrkv_jax.runtime import processes

POLL_SECONDS = 1.0

_names = itertools.count()


class Stopping:
    """Use as a context manager around the loop; in several processes around the same one.

    `signal` is the number of the signal that was noticed, here or elsewhere, or None.
    """

    def __init__(self, start_step: int):
        self.signal: int | None = None
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
            return self.signal is not None
        with self._lock:
            self._step = step
            return self._last == step

    def _catch(self) -> None:
        """Note signals from now on; outside the main thread they are the caller's."""
        if threading.current_thread() is not threading.main_thread():
            return

        def note(number, frame):
            self.signal = number

        old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
        self._restore = lambda: [signal.signal(s, handler) for s, handler in old.items()]

    def _watch(self) -> None:
        client, told = processes.client(), False
        while not self._over.wait(POLL_SECONDS):
            if self.signal is not None and not told:
                told = True
                client.key_value_set(
                    f"{self._name}/told/{processes.index()}", str(int(self.signal))
                )
            answers = client.key_value_dir_get(f"{self._name}/told/")
            if answers:
                # The loop cannot pass a step while this is held, here or in any process.
                with self._lock:
                    self._last = self._agree(client)
                self.signal = self.signal or int(answers[0][1])
                return

    def _agree(self, client) -> int:
        client.key_value_set(f"{self._name}/step/{processes.index()}", str(self._step))
        processes.wait_for_all(f"{self._name}/steps")
        steps = client.key_value_dir_get(f"{self._name}/step/")
        return max(int(step) for _, step in steps) + 1
