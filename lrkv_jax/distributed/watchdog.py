"""Reports what hangs, with every thread's stack, and ends what hangs for good.

A process may wait for a collective that a peer never joins, for a lost file system, or for a batch
that never comes. It shows nothing, and costs as much as one that works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from lrkv_jax.errors import EXIT_UNAVAILABLE

# Compiling a large model may take hours; it is reported and never ended.
COMPILE = "compile"


class Watchdog:
    """Records what the main thread does, and since when; use as a context manager around it.

    After `warn_after` seconds of one activity, `warn` gets a line and stderr the stacks, and again
    when the time has doubled. After `end_after` it calls `leave` with 69, which launchers count, as
    nothing was saved. None is never.
    """

    def __init__(
        self,
        warn_after: float | None,
        end_after: float | None,
        warn: Callable[[str], None],
        leave: Callable[[int], None],
    ):
        limits = (math.inf if limit is None else limit for limit in (warn_after, end_after))
        self._warn_after, self._end_after = limits
        self._warn, self._leave = warn, leave
        self._doing = ("start", 0, time.monotonic())
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        first = min(self._warn_after, self._end_after)
        if first < math.inf:
            poll = min(5.0, first / 10)
            self._thread = threading.Thread(target=self._watch, args=(poll,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def at(self, activity: str, step: int) -> None:
        """The main thread begins something: `data`, `step`, `save`, ..."""
        self._doing = (activity, step, time.monotonic())

    @contextlib.contextmanager
    def during(self, activity: str, step: int) -> Iterator[None]:
        """Watch a block as this activity; afterwards the earlier activity starts again."""
        before = self._doing
        self.at(activity, step)
        try:
            yield
        finally:
            self.at(*before[:2])

    def _watch(self, poll: float) -> None:
        reported, again = None, 0.0
        while not self._over.wait(poll):
            doing = self._doing
            activity, step, since = doing
            seconds = time.monotonic() - since
            if doing is not reported:
                again = self._warn_after
            if seconds > again:
                reported, again = doing, 2 * seconds
                self._warn(f"{activity} of step {step} has taken {seconds:.0f} s: stacks follow")
                _stacks()
            if seconds > self._end_after and activity != COMPILE:
                self._warn(
                    f"{activity} of step {step} hangs for {seconds:.0f} s: this process ends, and "
                    "the same command resumes from the last checkpoint (watchdog.end_after)"
                )
                _stacks()
                self._leave(EXIT_UNAVAILABLE)


def _stacks() -> None:
    with contextlib.suppress(OSError, ValueError):  # a full disk; a stderr that is not a file
        sys.stdout.flush()
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
