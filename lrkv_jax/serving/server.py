"""The process: a socket, uvicorn on it, and signals that let accepted requests end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from lrkv_jax.errors import LrkvError
from lrkv_jax.serving.app import application
from lrkv_jax.serving.connections import BACKLOG, WAITING, Connection, ConnectionLimits, Connections
from lrkv_jax.serving.guards import is_loopback
from lrkv_jax.serving.service import Service

KEY_VARIABLE = "LRKV_SERVE_KEY"
# Bytes of a request's line and headers.
HEADERS = 64 << 10


def key_of(path: str | None) -> str | None:
    """The key that clients send: a file's, else the environment's, else none.

    Raises `LrkvError` for a file that cannot be read or holds none.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if path is not None:
        try:
            key = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LrkvError(f"{path} cannot be read as a key ({error})") from None
        if not key:
            raise LrkvError(f"{path} is empty: write a key into it")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise LrkvError("the key has characters that a header cannot hold: use letters and digits")
    return key or None


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
    if key is None and not is_loopback(str(address[0])):
        raise LrkvError(
            f"--host {host} lets others in: give --key-file FILE or {KEY_VARIABLE}=KEY, or use "
            "127.0.0.1"
        )
    there = socket.socket(family, socket.SOCK_STREAM)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        there.bind(address)
    except OSError as error:
        there.close()
        raise LrkvError(f"{host}:{port}: {error.strerror}; use another --port") from None
    return there


def serve(
    service: Service,
    there: socket.socket,
    key: str | None,
    *,
    drain: float,
    ready: Callable[[Callable[[], None]], None] = lambda leave: None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve until a signal; then accept nothing more, and end what was accepted within `drain`.

    A second signal ends at once. `ready` is called when clients can connect, with what does as a
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
        timeout_graceful_shutdown=int(drain), timeout_keep_alive=15, backlog=BACKLOG,
        http=Connection.counted_in(connections),  # type: ignore[arg-type]
    )  # fmt: skip
    _Server(config, service, ready).run(sockets=[there])
    if service.runner.fault is not None:
        raise service.runner.fault


@contextlib.contextmanager
def serving(
    service: Service, key: str | None = None, *, drain: float = 30.0, **how: Any
) -> Iterator[int]:
    """Serve in a thread of this process, on a free port, which is given; raises what ended it.

    Keywords are those of `serve`.
    """
    there = bound("127.0.0.1", 0, key)
    port = there.getsockname()[1]
    leaves: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1, "server") as pool:
        ended = pool.submit(serve, service, there, key, drain=drain, ready=leaves.put, **how)
        ended.add_done_callback(lambda _: leaves.put(None))
        leave = leaves.get()  # None if it ended before it was ready
        try:
            if leave is not None:
                yield port
        finally:
            if leave is not None:
                leave()
            ended.result()


class _Server(uvicorn.Server):
    """uvicorn's, whose process ends with 0 when it was asked to end."""

    def __init__(self, config, service, ready):
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets=None):
        await super().startup(sockets)
        for there in sockets or ():
            there.listen(WAITING)
        self._ready(self._leave)

    async def on_tick(self, counter):
        given_up = self._service.runner.fault is not None
        return await super().on_tick(counter) or given_up

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
        self.force_exit = self.should_exit
        self.should_exit = self._service.draining = True
