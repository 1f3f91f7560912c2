"""The thread that owns the engine: it takes orders between two calls, and tells what is new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine
from lrkv_jax.inference.request import Request
from lrkv_jax.serving.texts import Piece

_log = logging.getLogger("lrkv_jax.serving")

# Calls that may fail one after the other before their works are given up, and then the engine.
FAULTS = 3
# A call of steps is to take about so long: what it says is told when it has ended.
CALL_SECONDS = 0.05
# How much one call moves what a step is thought to take.
LEARNT = 0.2


class ServerError(Exception):
    """What a client is told whose request failed with others, through no fault that is known."""


class Work(Protocol):
    """What the engine is asked for, as `texts.Text` is. turn: as `Turns` gives it."""

    request: Request | None
    prompt: list[int]
    new_tokens: int
    turn: int

    def begin(self, engine: Engine) -> None: ...
    def grow(self) -> Piece | None: ...


Tell = Callable[[Piece], None]


class Runner:
    """Runs an engine in a thread of its own, from `start` until `stop`.

    `ask` and `drop` may be called from the event loop at any time; what is new is told there too,
    and nothing is told of a work once it is dropped.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.fault: BaseException | None = None  # why the engine was given up
        self.faults = 0  # calls that failed
        self.calls, self.seconds = 0, 0.0  # calls of the engine, and the time in them
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._going: dict[Work, Tell] = {}  # the thread's
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._since = time.monotonic()
        self._consecutive = 0  # faults, without a call that ended between them
        self._anew = False  # whether the engine was emptied since a call ended
        self._step_seconds = 0.0  # of a step, as the last calls took
        self._steady = False  # whether the last call was one of steps alone

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin, telling things to this event loop."""
        self._loop = loop
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after its present call; what is still asked for is not told any more."""
        self._orders.put(None)
        self._thread.join(timeout)

    def ask(self, work: Work, tell: Tell) -> None:
        """Begin a work; `tell` gets each piece, the last of them with a reason or an error."""
        self._orders.put(lambda: self._begin(work, tell))

    def drop(self, work: Work) -> None:
        """End a work, wherever it is; its pages are free before the next call."""
        self._orders.put(lambda: self._leave(work))

    @property
    def busy(self) -> int:
        """Works that are not over."""
        return len(self._going)

    @property
    def silent(self) -> float:
        """Seconds since the present call began; 0 when there is nothing to do."""
        return time.monotonic() - self._since if self._going else 0.0

    def _begin(self, work, tell):
        try:
            if self.fault is not None:
                raise self.fault
            work.begin(self.engine)
            self._going[work] = tell
        except Exception as error:
            self._tell([(tell, Piece(error=error))])

    def _leave(self, work):
        self._going.pop(work, None)
        if work.request is not None:
            self.engine.cancel(work.request)

    def _run(self):
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    order = self._orders.get(block=not self._going)
                    if order is None:
                        return
                    order()
            self._call()

    def _call(self):
        """One call of the engine, and what is new by it."""
        self._since = began = time.monotonic()
        try:
            self.engine.advance()
            self._consecutive, self._anew = 0, False
        except Exception as error:  # whatever stops a call, requests can go on in the next
            self._failed(error)
        seconds = time.monotonic() - began
        self.calls += 1
        self.seconds += seconds
        self._pace(seconds)
        news = []
        for work, tell in list(self._going.items()):
            try:
                piece = work.grow() if self.fault is None else Piece(error=self.fault)
            except Exception as error:
                _log.exception("a text could not be told")
                piece = Piece(error=error)
            if piece is None:
                continue
            if piece.reason or piece.error:
                self._leave(work)
            news.append((tell, piece))
        if news:
            self._tell(news)

    def _pace(self, seconds):
        """Let calls of steps take `CALL_SECONDS`: fewer steps of a large model. No text changes."""
        scheduler, plan = self.engine.scheduler, self.engine.scheduler.last
        alone = plan.steps > 0 and not (plan.fills or plan.scores or plan.aside or plan.back)
        if alone and self._steady:
            each = seconds / plan.steps
            self._step_seconds += (LEARNT if self._step_seconds else 1.0) * (
                each - self._step_seconds
            )
            wanted = round(CALL_SECONDS / max(self._step_seconds, 1e-9))
            scheduler.steps = min(max(wanted, 1), self.engine.steps_per_call)
        self._steady = alone

    def _failed(self, error):
        self.faults += 1
        self._consecutive += 1
        _log.error("a call of the engine failed", exc_info=error)
        if self._consecutive < FAULTS:
            return
        given_up = LrkvError(f"the engine failed {FAULTS} times in a row ({error})")
        if self._anew:
            self.fault = given_up
            return
        # What is asked for now may be what no call can do: others are to be served after it.
        self._consecutive, self._anew = 0, True
        failed = ServerError(str(given_up))
        self._tell([(tell, Piece(error=failed)) for tell in self._going.values()])
        for work in self._going:
            work.request = None  # there is nothing of it any more
        self._going.clear()
        self.engine.reset()

    def _tell(self, news):
        def tell_all():
            for tell, piece in news:
                tell(piece)

        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
            self._loop.call_soon_threadsafe(tell_all)
