"""Each process knows at once when another is gone, and says so, and all end.

A process that dies leaves the others in a collective: on GPUs they wait for ever, on CPUs they fail
with a library's error, and JAX's own service ends them after 100 seconds with a C++ abort. So each
keeps its connection to process 0 (see `meeting`), over which both say now and then that they are
alive. The kernel closes a dead process's connections in the moment of its death; a host that
vanished, or a process that was stopped, is silent.

Process 0 tells the others whom it lost; whoever loses process 0 knows by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lrkv_jax.errors import EXIT_START_AGAIN

LOST_SECONDS = 60  # of silence; JAX's own service takes 100


@dataclass
class _Peer:
    """One end of a connection, what came over it and was no whole line yet, and when."""

    process: int
    call: socket.socket
    heard: float = field(default_factory=time.monotonic)
    pending: bytes = b""
    over: bool = False  # it has said goodbye

    def say(self, **what: Any) -> None:
        with contextlib.suppress(OSError):
            self.call.sendall(json.dumps(what).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]] | None:
        """What it said since the last time; None when the connection has ended."""
        try:
            part = self.call.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        if not part:
            return None
        self.heard = time.monotonic()
        *whole, self.pending = (self.pending + part).split(b"\n")
        return [json.loads(line) for line in whole]


class Peers:
    """This process's connections, and the thread that listens to them until `goodbye`."""

    def __init__(
        self, me: int, calls: dict[int, socket.socket], name: Callable[[int], str], seconds: float
    ):
        self._me, self._name, self._seconds = me, name, seconds
        self._peers = [_Peer(process, call) for process, call in calls.items()]
        self._over = threading.Event()
        for call in calls.values():
            call.settimeout(5)  # of sending; reading asks the selector first
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        atexit.register(self.goodbye)

    def goodbye(self, code: int | None = None) -> None:
        """Tell the others that this process ends: in order, or by itself, with an exit code."""
        if self._over.is_set():
            return
        self._over.set()
        for peer in self._peers:
            peer.say(bye=code)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.call, selectors.EVENT_READ, peer)
            beat = 0.0
            while not self._over.is_set():
                for key, _ in selector.select(timeout=min(1.0, self._seconds / 5)):
                    if not self._heard(key.data):
                        selector.unregister(key.data.call)
                now = time.monotonic()
                for peer in self._peers:
                    if not peer.over and now - peer.heard > self._seconds:
                        self._lost(peer.process, f"silent for {self._seconds:.0f} s")
                if now - beat > self._seconds / 5:
                    beat = now
                    for peer in self._peers:
                        if not peer.over:
                            peer.say(alive=True)

    def _heard(self, peer: _Peer) -> bool:
        """Act on what a peer has said; False when nothing more can come from it."""
        said = peer.lines()
        for what in said or ():
            if "lost" in what:  # process 0 says who
                self._end(what["lost"], what["how"], what["code"])
            elif "bye" in what:
                peer.over = True
                if what["bye"] is not None:
                    self._lost(peer.process, "ended by itself, see its own lines", what["bye"])
        if said is None and not peer.over and not self._over.is_set():
            self._lost(peer.process, "its connection ended: killed, or out of memory")
        return said is not None

    def _lost(self, process: int, how: str, code: int = EXIT_START_AGAIN) -> None:
        if self._me == 0:
            for peer in self._peers:
                if peer.process != process and not peer.over:
                    peer.say(lost=process, how=how, code=code)
        self._end(process, how, code)

    def _end(self, process: int, how: str, code: int) -> None:
        if self._over.is_set():
            return  # this process is at its own end
        # One line is enough where process 0 can write it.
        if self._me == 0 or process == 0:
            again = ", and the same command resumes from the last checkpoint"
            print(
                f"lrkv: {self._name(process)} is lost ({how}): all processes end"
                + (again if code == EXIT_START_AGAIN else ""),
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
