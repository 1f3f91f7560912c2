"""The routes: OpenAI's completions and chat completions, and what runs a server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from lrkv_jax.errors import LrkvError
from lrkv_jax.serving import asked as bodies
from lrkv_jax.serving.clients import Streamed, unless_gone
from lrkv_jax.serving.exchange import Exchange
from lrkv_jax.serving.guards import Guards
from lrkv_jax.serving.replies import Spelling
from lrkv_jax.serving.runner import ServerError
from lrkv_jax.serving.service import Refused, Service, overloaded

_COUNTED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "stream")
# Seconds for a client to send its body.
BODY_SECONDS = 30.0
# Bytes of a body that is read between two others' turns.
SHORT_BODY = 64 << 10
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(
    service: Service,
    key: str | None = None,
    *,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
) -> Starlette:
    """The server's application; with a `key`, all but the page and its health asks for it.

    hosts: as for `Guards`. origins: of pages of other sites that may ask; "*" is any.
    """
    routes = _Routes(service, key)
    page = resources.files("lrkv_jax.serving").joinpath("page.html").read_text()

    async def shown(request):
        return HTMLResponse(page, headers={"content-security-policy": _POLICY})

    @contextlib.asynccontextmanager
    async def running(app):
        service.runner.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.runner.stop, 10.0)

    cross: dict[str, Any] = {
        "allow_origins": origins,
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
    }
    expected = (Refused, HTTPException, LrkvError, ServerError, TimeoutError)
    return Starlette(
        routes=[
            Route("/", shown),
            Route("/live", routes.live),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.models),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
        ],
        exception_handlers={
            **dict.fromkeys(expected, routes.failed),
            ClientDisconnect: routes.gone,
            Exception: routes.failed,  # and the server's log gets its traceback
        },
        middleware=[
            Middleware(Guards, hosts=hosts),
            *([Middleware(CORSMiddleware, **cross)] if origins else []),
        ],
        lifespan=running,
    )


class _Routes:
    def __init__(self, service: Service, key: str | None):
        self.service, self._key = service, key
        self._reading = 0  # bytes of bodies that are being read
        self._long_body = asyncio.Lock()
        self._spelling = Spelling(service.tokenizer)

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
            "id": service.name, "object": "model", "created": service.began, "owned_by": "lrkv_jax",
            "max_model_len": service.context, "chat": service.chat is not None,
        }  # fmt: skip
        name = request.path_params.get("model")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != service.name:
            service.check(name)
        return JSONResponse(model)

    async def tokenizer_info(self, request: Request) -> Response:
        """That no text is a special token, as lm-eval asks it."""
        self._check_key(request)
        tokenizer = self.service.tokenizer
        content = {"tokenizer": tokenizer.name, "vocabulary": tokenizer.vocabulary}
        return JSONResponse({**content, "bos_token": None, "eos_token": None})

    async def tokenize(self, request: Request) -> Response:
        """A text's ids."""
        asked = await self._body(request, bodies.Tokenize)
        tokenizer = self.service.tokenizer
        encode = tokenizer.prompt if asked.add_special_tokens else tokenizer.encode
        ids = list(map(int, await asyncio.to_thread(encode, asked.prompt)))
        content = {"tokens": ids, "count": len(ids), "max_model_len": self.service.context}
        return JSONResponse(content)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        asked = await self._body(request, bodies.Detokenize)
        return JSONResponse({"prompt": self.service.tokenizer.decode(asked.tokens)})

    async def completions(self, request: Request) -> Response:
        """Texts continued."""
        return await self._generate(request, bodies.Completion)

    async def chat(self, request: Request) -> Response:
        """A conversation's next turn."""
        return await self._generate(request, bodies.Chat)

    # Requests.

    def _check_key(self, request):
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not right:
            raise Refused(
                401, "the key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key", kind="authentication_error",
            )  # fmt: skip

    async def _body(self, request, kind):
        """What is asked; whatever is wrong with it is a `Refused`."""
        self._check_key(request)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":  # which other sites' pages cannot send
            raise Refused(415, f"content-type {media or 'is missing'}: send application/json")
        limits, body = self.service.limits, bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    self._reading += len(chunk)
                    if len(body) > limits.body:
                        raise Refused(413, f"the body is longer than {limits.body} bytes")
                    if self._reading > limits.bodies:
                        raise overloaded("too many long bodies come at a time")
            if len(body) < SHORT_BODY:
                asked, wrong, place = bodies.read(kind, bytes(body))
            else:  # one at a time, and others are answered between them
                async with self._long_body:
                    made = await asyncio.to_thread(bodies.read_long, kind, bytes(body))
                    asked, wrong, place = made
        except TimeoutError:
            raise Refused(408, f"the body took longer than {BODY_SECONDS:.0f} seconds") from None
        finally:
            self._reading -= len(body)
        if asked is None:
            raise Refused(400, wrong, param=place or None)
        self.service.check(asked.model)
        return asked

    async def _generate(self, request, kind):
        began = time.monotonic()
        asked = await self._body(request, kind)
        try:  # a long prompt takes its time to encode, and others are answered meanwhile
            made = await asyncio.to_thread(self.service.texts_of, asked)
        except LrkvError as error:
            raise Refused(400, str(error)) from None
        address = request.client.host if request.client else ""
        exchange = Exchange(self.service, self._spelling, asked, made, began, address)
        pieces = exchange.pieces()
        # What is refused is refused before the reply's first byte.
        first = await unless_gone(anext(pieces, None), request.receive)
        if asked.stream:
            return Streamed(exchange.events(first, pieces), pieces, self._stream_ended)
        whole = await unless_gone(exchange.whole(first, pieces), request.receive)
        self._count(request.url.path, 200)
        return JSONResponse(whole)

    # Answers.

    async def failed(self, request: Request, error: Exception) -> Response:
        """OpenAI's error object, of whatever went wrong."""
        refused = _refusal(error)
        self._count(request.url.path, refused.status)
        headers = {} if refused.after is None else {"retry-after": str(refused.after)}
        return JSONResponse(refused.body, refused.status, headers=headers)

    async def gone(self, request: Request, error: Exception) -> Response:
        """Nobody is there to read it."""
        self.service.metrics.aborted.inc()
        return Response(status_code=499)

    def _stream_ended(self, error):
        """Count a stream; what to tell of an error that ended it."""
        if isinstance(error, ClientDisconnect):
            self.service.metrics.aborted.inc()
            return {}
        refused = None if error is None else _refusal(error)
        self._count("stream", 200 if refused is None else refused.status)
        return {} if refused is None else refused.body

    def _count(self, path, code):
        self.service.metrics.requests.labels(path if path in _COUNTED else "other", code).inc()


def _refusal(error):
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(error.status_code, f"{error.detail}: see /v1/models")
    if isinstance(error, TimeoutError):
        return Refused(504, "the reply took too long", kind="server_error", code="timeout")
    if isinstance(error, LrkvError):
        return Refused(400, str(error))
    if isinstance(error, ServerError):
        return Refused(500, f"{error}: ask again", kind="server_error")
    return Refused(500, f"the server failed ({type(error).__name__})", kind="server_error")
