"""The routes: OpenAI's completions and chat completions, and what runs a server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from importlib import resources
from typing import Any
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lrkv_jax.errors import LrkvError
from lrkv_jax.serving.engine_loop import EngineError
from lrkv_jax.serving.request_schema import ChatRequest, CompletionRequest, TokenizeRequest, read
from lrkv_jax.serving.responses import Responder
from lrkv_jax.serving.service import SHARE, APIError, Service, overloaded

_COUNTED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "stream")
# Seconds for a client to send its body.
BODY_SECONDS = 30.0
# Bodies of one address whose text is encoded at a time: others find a thread that is free.
ENCODED = 2
_POLICY = (
    "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(
    service: Service,
    key: str | None = None,
    *,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
) -> Starlette:
    """The server's application; with a `key`, only the page and its health work without it.

    hosts: names by which a request may mean this server, None for any. A page of another site can
    have its name resolved to this machine, and would then reach a server that serves it alone.
    origins: of pages of other sites that may send requests; "*" is any.
    """
    routes = _Routes(service, key)
    page = resources.files("lrkv_jax.serving").joinpath("page.html").read_text()

    async def show_page(request):
        nonce = secrets.token_urlsafe(16)  # no script runs but the page's
        policy = {"content-security-policy": _POLICY.format(nonce=nonce)}
        return HTMLResponse(page.replace("NONCE", nonce), headers=policy)

    @contextlib.asynccontextmanager
    async def running(app):
        service.engine_loop.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.engine_loop.stop)

    methods, headers = ["GET", "POST"], ["*"]
    expected = (APIError, HTTPException, LrkvError, EngineError, TimeoutError)
    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/live", routes.live),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.models),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
        ],
        exception_handlers={
            **dict.fromkeys(expected, routes.failed),
            ClientDisconnect: routes.gone,
            Exception: routes.failed,  # and the server's log gets its traceback
        },
        middleware=[
            *([] if hosts is None else [Middleware(TrustedHostMiddleware, list(hosts), False)]),
            *([Middleware(CORSMiddleware, origins, methods, headers)] if origins else []),
        ],
        lifespan=running,
    )


class _Routes:
    def __init__(self, service: Service, key: str | None):
        self.service, self._key = service, key
        self._reading: Counter[str] = Counter()  # bytes of bodies, of each address
        self._encoding: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def live(self, request: Request) -> Response:
        """The process answers."""
        return JSONResponse({"status": "alive"})

    async def health(self, request: Request) -> Response:
        """Whether a request would be served now."""
        trouble = self.service.health()
        content = {"status": trouble or "ok", "model": self.service.name}
        return JSONResponse(content, 503 if trouble else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus's series."""
        self._check_key(request)
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The one model, in a list or by its name."""
        self._check_key(request)
        service = self.service
        model = {
            "id": service.name, "object": "model", "created": service.created,
            "owned_by": "lrkv_jax", "max_model_len": service.context,
            "chat": service.chat is not None, "system_role": service.takes_system,
        }  # fmt: skip
        name = request.path_params.get("model")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != service.name:
            service.check(name)
        return JSONResponse(model)

    async def tokenize(self, request: Request) -> Response:
        """A text's ids, as vLLM returns them."""

        def encoded(body):
            tokenizer = self.service.tokenizer
            encode = tokenizer.prompt if body.add_special_tokens else tokenizer.encode
            return list(map(int, encode(body.prompt)))

        _, ids = await self._body(request, TokenizeRequest, encoded)
        self._count(request.url.path, 200)
        content = {"tokens": ids, "count": len(ids), "max_model_len": self.service.context}
        return JSONResponse(content)

    async def completions(self, request: Request) -> Response:
        """Texts continued."""
        return await self._generate(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """A conversation's next turn."""
        return await self._generate(request, ChatRequest)

    # Requests.

    def _check_key(self, request):
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not right:
            raise APIError(
                401, "the key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key", kind="authentication_error",
            )  # fmt: skip

    async def _body(self, request, kind, encode):
        """The parsed body, and what `encode` makes of it in a thread.

        Whatever is wrong with it is an `APIError`.
        """
        self._check_key(request)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":  # which other sites' pages cannot send
            raise APIError(415, f"content-type {media or 'is missing'}: send application/json")
        limits, body, address = self.service.limits, bytearray(), _address(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    self._reading[address] += len(chunk)
                    if len(body) > limits.body:
                        raise APIError(413, f"the body is longer than {limits.body} bytes")
                    all_bodies, of_address = self._reading.total(), self._reading[address]
                    if all_bodies > limits.bodies or of_address > SHARE * limits.bodies:
                        raise overloaded("too many long bodies come at a time")
            parsed, wrong, place = read(kind, bytes(body))
            if parsed is None:
                raise APIError(400, wrong, param=place or None)
            self.service.check(parsed.model)
            encoded = self._encoded(address, encode, parsed)
            return parsed, await unless_disconnected(encoded, request.receive)
        except TimeoutError:
            raise APIError(408, f"the body took longer than {BODY_SECONDS:.0f} seconds") from None
        finally:
            self._reading -= Counter({address: len(body)})

    async def _encoded(self, address, encode, parsed):
        semaphore = self._encoding.setdefault(address, asyncio.Semaphore(ENCODED))
        await semaphore.acquire()
        thread = asyncio.ensure_future(asyncio.to_thread(encode, parsed))

        def free(thread):
            semaphore.release()
            thread.exception()  # seen, where nobody waits any more

        thread.add_done_callback(free)
        return await asyncio.shield(thread)  # a client that leaves ends no thread

    async def _generate(self, request, kind):
        began = time.monotonic()
        body, (completions, seed) = await self._body(request, kind, self.service.completions_of)
        responder = Responder(self.service, body, completions, seed, began)
        deltas = self.service.deltas(completions, _address(request))
        if body.stream:
            events = responder.events(deltas)
            # What is refused is refused before the response's first byte.
            first = await unless_disconnected(anext(events), request.receive)
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # for proxies
            content = self._stream(first, events)
            return StreamingResponse(content, media_type="text/event-stream", headers=headers)
        whole = await unless_disconnected(responder.whole(deltas), request.receive)
        self._count(request.url.path, 200)
        return JSONResponse(whole)

    async def _stream(self, first, events):
        """Server-sent events; the one before the last tells of an error that ended them."""
        code = 200
        try:
            async with contextlib.aclosing(events):
                yield _sent(first)
                async for event in events:
                    yield _sent(event)
        except (asyncio.CancelledError, GeneratorExit):
            self.service.metrics.aborted.inc()
            raise
        except Exception as error:
            refused = _api_error(error)
            code = refused.status
            yield _sent(refused.body)
        self._count("stream", code)
        yield "data: [DONE]\n\n"

    # Answers.

    async def failed(self, request: Request, error: Exception) -> Response:
        """OpenAI's error object, of whatever went wrong."""
        refused = _api_error(error)
        self._count(request.url.path, refused.status)
        headers = dict(getattr(error, "headers", None) or {})  # Allow, for another method
        if refused.retry_after is not None:
            headers["retry-after"] = str(refused.retry_after)
        return JSONResponse(refused.body, refused.status, headers=headers)

    async def gone(self, request: Request, error: Exception) -> Response:
        """The response to a client that has disconnected, which nobody reads."""
        self.service.metrics.aborted.inc()
        return Response(status_code=499)

    def _count(self, path, code):
        self.service.metrics.requests.labels(path if path in _COUNTED else "other", code).inc()


def _address(request):
    return request.client.host if request.client else ""


def _api_error(error):
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, f"{error.detail}: see /v1/models")
    if isinstance(error, TimeoutError):
        return APIError(504, "the response took too long", kind="server_error", code="timeout")
    if isinstance(error, LrkvError):
        return APIError(400, str(error))
    if isinstance(error, EngineError):
        return APIError(500, f"{error}: ask again", kind="server_error")
    return APIError(500, f"the server failed ({type(error).__name__})", kind="server_error")


def _sent(event):
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


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
