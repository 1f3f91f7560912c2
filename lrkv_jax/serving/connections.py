"""Connections: how many there are, how long they may be idle, and which one makes room.

Whoever holds many idle ones shuts nobody out: where there is no room, the one of that address that
has been idle longest is closed for the new one, and then the one of all addresses.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# Connections that are accepted before any of them is looked at, and those that the kernel keeps
# waiting before that: who finds no room there tries again only after a second.
BACKLOG, WAITING = 16, 2048
# Seconds in which a client reads something of what it is sent.
SEND_SECONDS = 60.0
# Open files other than connections: those of data, logs and libraries that load late.
SPARE_FILES = 16


@dataclass(frozen=True)
class ConnectionLimits:
    """total, each: open connections, of all clients and of one address. head: seconds until a
    request's headers have come, from when the connection has nothing to do."""

    total: int = 2048
    each: int = 512
    head: float = 15.0

    def within_files(self) -> ConnectionLimits:
        """These limits, or lower ones where this process may not open as many files."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(8, most - len(os.listdir("/proc/self/fd")) - 4 * BACKLOG - SPARE_FILES)
        total = min(self.total, room)
        return ConnectionLimits(total, min(self.each, max(4, total * 3 // 4)), self.head)


class Connections:
    """The open connections of a server, each with the address that it comes from."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._open: set[Connection] = set()
        # In the order in which they became idle.
        self._idle: dict[Connection, None] = {}
        self._of: defaultdict[str, int] = defaultdict(int)

    def opened(self, one: Connection) -> bool:
        """Count a new connection; False if there is no room, whichever is closed for it."""
        if self._of[one.address] >= self.limits.each and not self._close_idle(one.address):
            return False
        if len(self._open) >= self.limits.total and not self._close_idle(None):
            return False
        self._open.add(one)
        self._of[one.address] += 1
        self._idle[one] = None
        return True

    def closed(self, one: Connection) -> None:
        """A connection is over, counted or not."""
        self._idle.pop(one, None)
        if one in self._open:
            self._open.discard(one)
            self._of[one.address] -= 1
            if not self._of[one.address]:
                del self._of[one.address]

    def busy(self, one: Connection) -> None:
        """Mark a connection as busy: its request is being answered."""
        self._idle.pop(one, None)

    def idle(self, one: Connection) -> None:
        """Mark a connection as idle: it waits for a request."""
        if one in self._open:
            self._idle.pop(one, None)
            self._idle[one] = None

    def _close_idle(self, address):
        """Close what has been idle longest, of an address or of all; False if none is."""
        found = (one for one in self._idle if address is None or one.address == address)
        oldest = next(found, None)
        if oldest is None:
            return False
        self.closed(oldest)
        oldest.transport.abort()
        return True


class Connection(H11Protocol):
    """uvicorn's connection, which is counted, and closed if no request comes in time."""

    address = ""
    _late: Any = None
    _unread: Any = None

    def __init__(self, *arguments: Any, connections: Connections, **more: Any):
        super().__init__(*arguments, **more)
        self._connections = connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._connections.opened(self):
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self._stop_waiting()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
            self._connections.busy(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._connections.idle(self)
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.cancel()

    def _await_reader(self):
        self._unread = self._later(SEND_SECONDS, self._await_reader)

    def _await_head(self):
        self._stop_waiting()
        # What is unsent is of the response before, which a client may read slowly.
        unsent = self.transport.get_write_buffer_size() > 0
        seconds = SEND_SECONDS if unsent else self._connections.limits.head
        self._late = self._later(seconds, self._await_head)

    def _later(self, seconds, again):
        """Wait `again` if some of what is unsent is read by then; else close the connection."""
        unsent = self.transport.get_write_buffer_size()

        def look():
            if self.transport.get_write_buffer_size() < unsent:
                again()
            else:
                self.transport.abort()

        return self.loop.call_later(seconds, look)

    def _stop_waiting(self):
        if self._late is not None:
            self._late.cancel()
            self._late = None
