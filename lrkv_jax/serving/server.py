"""The process: a socket, uvicorn on it, and signals that let accepted requests end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import uvicorn
from pydantic import ByteSize, TypeAdapter, ValidationError

from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_UNAVAILABLE, LrkvError
from lrkv_jax.serving.app import application
from lrkv_jax.serving.connections import BACKLOG, WAITING, Connection, ConnectionLimits, Connections
from lrkv_jax.serving.service import Service

KEY_VARIABLE = "LRKV_SERVE_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Bytes of a request's line and headers.
HEADERS = 64 << 10


def key_of(path: str | None) -> str | None:
    """The key that clients send: a file's, else the environment's, else none.

    Raises `LrkvError` for a file that holds none, and `OSError` for one that cannot be read.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if path is not None:
        key = Path(path).read_text(errors="replace").strip()
        if not key:
            raise LrkvError(f"{path} is empty: write a key into it")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise LrkvError("the key has characters that a header cannot hold: use letters and digits")
    return key or None


def bytes_of(option: str, text: str) -> int:
    """The bytes of a size as in 512MB or 2GiB; raises `LrkvError` for anything else."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise LrkvError(f"{option} {text}: use a size, as in 512MB or 2GiB") from None


def bound(host: str, port: int, key: str | None) -> socket.socket:
    """A socket of this address, to which nobody can connect yet.

    Raises `LrkvError` for an address that cannot be had, and where others than this machine would
    be served without a key.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise LrkvError(f"--host {host} --port {port}: no such address ({error})") from None
    if key is None and not _is_loopback(str(address[0])):
        raise LrkvError(
            f"--host {host} lets others in: give --key-file FILE or {KEY_VARIABLE}=KEY, or use "
            "127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        code = EXIT_UNAVAILABLE if error.errno == errno.EADDRINUSE else EXIT_BAD_INPUT
        raise LrkvError(f"{host}:{port}: {error.strerror}; use another --port", code) from None
    return listener


def allowed_hosts(address: str, host: str, more: Collection[str]) -> frozenset[str] | None:
    """The hosts that a server of this address answers to; None, for any, beyond loopback.

    more: further names, or *. Beyond loopback a client has a key, which no other site's page knows.
    Raises `LrkvError` for a * inside a name.
    """
    if "*" in more or (not more and not _is_loopback(address)):
        return None
    for name in more:
        if "*" in name.removeprefix("*."):
            raise LrkvError(f"--allowed-host {name}: use a name, *.example.org or *")
    return frozenset({*LOOPBACK, _in_url(address), _in_url(host), *more})


def _in_url(host):
    return f"[{host}]" if ":" in host else host


def _is_loopback(address):
    """Whether an address, with or without a zone, is one that this machine alone can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """The URL of the server of this socket."""
    address, port = listener.getsockname()[:2]
    return f"http://{_in_url(address)}:{port}/"


def serve(
    service: Service,
    listener: socket.socket,
    key: str | None,
    *,
    drain: float,
    ready: Callable[[Callable[[], None]], None] = lambda leave: None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    limits: ConnectionLimits | None = None,
) -> int:
    """Serve until a signal; then accept nothing more, and end what was accepted within `drain`.

    Returns how many requests took longer, and were cut short. A second signal cuts all of them
    short. `ready` is called when clients can connect, with what does as a
    signal does. hosts, origins: as for `application`. Raises `LrkvError` where the engine was given
    up.
    """
    connections = Connections((limits or ConnectionLimits()).within_files())
    # What clients do is no news: warnings of it would fill the log.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config = uvicorn.Config(
        application(service, key, hosts=hosts, origins=origins),
        log_config=None, log_level="error", access_log=False, lifespan="on", ws="none",
        server_header=False, h11_max_incomplete_event_size=HEADERS, loop="asyncio",
        timeout_keep_alive=15, backlog=BACKLOG,
        proxy_headers=False,  # of which any client could make an address
        http=functools.partial(Connection, connections=connections),  # type: ignore[arg-type]
    )  # fmt: skip
    server = _Server(config, service, drain, ready)
    server.run(sockets=[listener])
    if service.engine_loop.fault is not None:
        raise service.engine_loop.fault
    return server.cut


class _Server(uvicorn.Server):
    """uvicorn's server, whose process exits with 0 after a signal to stop."""

    def __init__(self, config, service, drain, ready):
        super().__init__(config)
        self._service, self._drain, self._ready = service, drain, ready
        self._at_once = False
        self.cut = 0  # requests that the end cut short

    async def startup(self, sockets=None):
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)
        self._ready(self._leave)

    async def on_tick(self, counter):
        given_up = self._service.engine_loop.fault is not None
        return await super().on_tick(counter) or given_up

    async def shutdown(self, sockets=None):
        late = asyncio.create_task(self._cut_late())
        await super().shutdown(sockets)
        late.cancel()

    async def _cut_late(self):
        """Close the connections of what is not answered in time."""
        end = time.monotonic() + self._drain
        while time.monotonic() < end and not self._at_once:
            await asyncio.sleep(0.1)
        self.cut = len(self.server_state.tasks)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._leave) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self, *signalled):
        self._at_once = self.should_exit
        self.should_exit = self._service.draining = True
