"""What every request passes before it is looked at: whom it means, and the name that it goes by."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse

from lrkv_jax.errors import LrkvError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Guards:
    """An ASGI application behind two guards.

    hosts: names by which a request may mean this server, None for any. A page of another site can
    have its name resolved to this machine, and would then reach a server that serves it alone.

    Every answer bears an `x-request-id`: the client's if it is printable, or a new one.
    """

    def __init__(self, app: Any, hosts: Collection[str] | None):
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it, as ASGI wants it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16).encode()

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        host = host_of(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is None or host in self._hosts:
            return await self._app(scope, receive, named)
        text = f"host {host[:80] or 'is missing'} is not this server: start it with --allowed-hosts"
        error = {"message": text, "type": "invalid_request_error", "param": None, "code": None}
        await JSONResponse({"error": error}, 421)(scope, receive, named)


def is_loopback(address: str) -> bool:
    """Whether an address, with or without a zone, is one that this machine alone can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_of(header: str) -> str:
    """The name in a Host header, without its port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def allowed_hosts(address: str, host: str, more: str | None) -> frozenset[str] | None:
    """The hosts that a server of this address answers to; None, for any, beyond loopback.

    more: names with commas between them, or *. Beyond loopback a client has a key, which no other
    site's page knows.
    """
    names = listed("--allowed-hosts", more)
    if "*" in names or (not names and not is_loopback(address)):
        return None
    return frozenset({*LOOPBACK, address, host, *names})


def listed(option: str, text: str | None) -> list[str]:
    """The names of an option; raises `LrkvError` for an empty one."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names):
        raise LrkvError(f"{option} {text}: give names with commas between them")
    return names
