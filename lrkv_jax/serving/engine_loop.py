"""The thread that runs the engine: it takes orders between two calls, and delivers new tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine
from lrkv_jax.serving.completion import Completion, TextDelta

_log = logging.getLogger("lrkv_jax.serving")

# Calls that may fail one after the other before the engine is given up.
FAULTS = 3
# A call of steps may take so long: its tokens are delivered when it has ended.
CALL_SECONDS = 0.05

Deliver = Callable[[TextDelta], None]


class EngineError(Exception):
    """The error of a request that failed with others, through no known fault."""


class EngineLoop:
    """Runs an engine in a separate thread, from `start` until `stop`.

    `add` and `cancel` may be called from the event loop at any time; deltas are delivered there
    too, and none of a completion once it is cancelled.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.fault: BaseException | None = None  # why the engine was given up
        self.faults = 0  # calls that failed
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[Completion, Deliver] = {}  # the thread's
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._since: float | None = None  # when the present call began
        self._consecutive = 0  # faults, without a call that ended between them

    def start(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Begin, and deliver to this event loop."""
        self._event_loop = event_loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present call, unless that hangs; nothing more is delivered."""
        self._orders.put(None)
        self._thread.join(10.0)

    def add(self, completion: Completion, deliver: Deliver) -> None:
        """Begin; `deliver` gets each delta, the last of them with a finish reason or an error."""
        self._orders.put(lambda: self._submit(completion, deliver))

    def cancel(self, completion: Completion) -> None:
        """End a completion, wherever it is; its pages are free before the next call."""
        self._orders.put(lambda: self._remove(completion))

    @property
    def seconds_in_call(self) -> float:
        """Seconds since the present call began; 0 between two calls."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def _submit(self, completion, deliver):
        try:
            if self.fault is not None:
                raise self.fault
            completion.submit(self.engine)
            self._running[completion] = deliver
        except Exception as error:
            self._deliver([(deliver, TextDelta(completion.index, error=error))])

    def _remove(self, completion):
        self._running.pop(completion, None)
        if completion.sequence is not None:
            self.engine.cancel(completion.sequence)

    def _run(self):
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    order = self._orders.get(block=not self._running)
                    if order is None:
                        return
                    order()
            self._call()

    def _call(self):
        """One call of the engine, and what is new by it."""
        began = self._since = time.monotonic()
        try:
            self.engine.advance()
            self._consecutive = 0
        except Exception as error:  # whatever stops a call, others can be served in the next
            self._failed(error)
        self._since = None
        self._pace(time.monotonic() - began)
        deltas = []
        for completion, deliver in list(self._running.items()):
            try:
                delta = completion.delta()
            except Exception as error:
                _log.exception("a completion could not be read")
                delta = TextDelta(completion.index, error=error)
            if delta is None:
                continue
            if delta.finish_reason or delta.error:
                self._remove(completion)
            deltas.append((deliver, delta))
        if deltas:
            self._deliver(deltas)

    def _pace(self, seconds):
        """Start fewer steps a call of a large model. No text changes by it."""
        scheduler = self.engine.scheduler
        if not scheduler.last.steps:
            return
        if seconds > CALL_SECONDS:
            scheduler.steps = max(scheduler.steps // 2, 1)
        elif seconds < CALL_SECONDS / 2:
            scheduler.steps = min(2 * scheduler.steps, self.engine.steps_per_call)

    def _failed(self, error):
        """End the requests of a call that failed; others find an empty engine."""
        self.faults += 1
        self._consecutive += 1
        _log.error("a call of the engine failed", exc_info=error)
        failed = EngineError(f"a call of the engine failed ({error})")
        if self._consecutive == FAULTS:
            self.fault = LrkvError(f"the engine failed {FAULTS} times in a row ({error})")
        running, self._running = self._running, {}
        self._deliver([(to, TextDelta(one.index, error=failed)) for one, to in running.items()])
        try:
            self.engine.reset()
        except Exception as again:  # as with a device that is lost
            self.fault = LrkvError(f"the engine cannot begin anew ({again}): start it again")

    def _deliver(self, deltas):
        def deliver_all():
            for deliver, delta in deltas:
                deliver(delta)

        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody listens
            self._event_loop.call_soon_threadsafe(deliver_all)
