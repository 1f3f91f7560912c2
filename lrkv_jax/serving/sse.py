"""Server-sent events, and responses that end when their client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy's: pass on each event
]


# Seconds in which a client reads something of what it is sent.
SEND_SECONDS = 60.0


class EventStream(Response):
    """Events as they come, until the client goes away; then `deltas` is closed at once.

    ended: called once with what ended the stream early, or None; returns an event about it, or {}.
    """

    def __init__(
        self,
        events: AsyncIterator[dict],
        deltas: AsyncGenerator,
        ended: Callable[[Exception | None], dict],
    ):
        self._events, self._deltas, self._ended = events, deltas, ended
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send all events, as an ASGI application."""

        async def send_event(content: str, more: bool = True) -> None:
            body = f"data: {content}\n\n".encode("utf-8", "replace")
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": body, "more_body": more})
            except TimeoutError:  # it does not read, and would keep its place for good
                raise ClientDisconnect from None

        async def all_events() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            wrong = None
            try:
                async for event in self._events:
                    await send_event(json.dumps(event, ensure_ascii=False))
            except ClientDisconnect:
                raise
            except Exception as error:
                wrong = error
            if last := self._ended(wrong):
                await send_event(json.dumps(last, ensure_ascii=False))
            await send_event("[DONE]", more=False)

        try:
            await unless_disconnected(all_events(), receive)
        except ClientDisconnect as error:
            self._ended(error)
        finally:
            with contextlib.suppress(RuntimeError):  # it is closing already
                await self._deltas.aclose()


async def unless_disconnected[Result](
    work: Coroutine[Any, Any, Result], receive: Callable
) -> Result:
    """The work's result. If the client goes away the work is cancelled: `ClientDisconnect`."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
