"""One trainer per run directory: a lock that its holder's death frees.

The file `lock` in the run's directory names its holder and is locked by it (`fcntl.lockf`: the
kernel, or an NFS server, frees it when the process ends; children do not inherit it). Not every
cluster's file system passes such locks from host to host, and some have none, so the holder also
touches the file every `BEAT_SECONDS`: one that is not touched for `STALE_SECONDS` is nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError
from lrkv_jax.training.run_dir import unusable

BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """The right to train in a directory; use as a context manager around `take`.

    `say` is called when the lock of a holder that is gone is taken over, or waited for. Of several
    `processes`, process 0 holds it for all.
    """

    def __init__(self, run_dir: str | Path, say: Callable[[str], None], processes: Processes):
        self.path, self._say, self._processes = Path(run_dir) / "lock", say, processes
        self._file: int | None = None
        self._over = threading.Event()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._over.set()
            self._beat.join()
            if not self._taker():
                with contextlib.suppress(OSError):
                    self.path.unlink()
            os.close(self._file)  # frees it
            self._file = None

    def take(self, *, if_there: bool = False) -> None:
        """Take the lock, unless this process has it; with `if_there` only where its file exists.

        Raises `LrkvError`, in all processes, while somebody else holds it. From another host, and
        where the file system has no locks, that shows within `BEAT_SECONDS`, and that it is gone
        after `STALE_SECONDS`.
        """
        with self._processes.together():
            if self._processes.index or self._file is not None:
                return
            if if_there and not os.path.exists(self.path):
                return
            try:
                self._file = self._taken()
            except OSError as error:
                raise unusable(self.path.parent, error) from error
        self._me = {
            "host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(),
            "since": time.time(), "token": secrets.token_hex(8),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk: the kernel's lock remains
            os.truncate(self._file, 0)
            os.pwrite(self._file, json.dumps(self._me).encode(), 0)
        self._beat = threading.Thread(target=self._keep, name="lock", daemon=True)
        self._beat.start()

    def _taken(self) -> int:
        """A descriptor of the file, locked by this process where the file system has locks."""
        seen, since, said = None, time.monotonic(), False
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                free = self._locked(file)
                if free and not _same_file(file, self.path):
                    os.close(file)  # its holder let go, and removed it, meanwhile
                    continue
                holder, beat = _read(file), os.fstat(file).st_mtime_ns
                if not holder and (free or free is None):
                    return file
                # Of a process of its machine the kernel knows whether it lives.
                known = free is not None and holder.get("machine") == _machine()
                still = time.monotonic() - since if seen == beat else 0.0
                gone = free if known else free is not False and still > STALE_SECONDS
                if gone:
                    self._say(f"{self.path}: taken over from {_name(holder)}, which is gone")
                    return file
                moved = seen is not None and seen != beat
                if known or moved or time.monotonic() - since > 2 * STALE_SECONDS:
                    raise LrkvError(
                        f"{self.path.parent} is being trained by {_name(holder)}: wait for it to "
                        "end, or give this run its own run_dir=PATH"
                    )
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            if not said:
                said = True
                self._say(
                    f"{self.path} is held by {_name(holder)}: waiting up to {STALE_SECONDS:.0f} s "
                    "for a sign of life"
                )
            seen = beat
            time.sleep(1.0)

    @staticmethod
    def _locked(file: int) -> bool | None:
        """Whether the kernel gave this process the lock; None where it has none to give."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def _keep(self) -> None:
        """Touch the file while the lock is held; end this process if another host has taken it."""
        while not self._over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._file)
            if taker := self._taker():
                who = _name(taker)
                print(f"lrkv: {self.path} was taken by {who}: this one ends", file=sys.stderr)
                self._processes.leave(EXIT_BAD_INPUT)

    def _taker(self) -> dict[str, Any]:
        """Who has taken the lock from this process; nobody while it is this process's."""
        there = _read(self._file)
        with contextlib.suppress(OSError):
            if not _same_file(self._file, self.path):  # removed by hand, and made again by another
                there = _parsed(self.path.read_bytes())
        # Nothing can be read of a lock that a full disk did not take, or a disk that is away.
        return {} if there.get("token") == self._me["token"] else there


def _read(file: int) -> dict[str, Any]:
    """What the holder wrote; nothing where it was killed while it wrote."""
    try:
        return _parsed(os.pread(file, 4096, 0))
    except OSError:
        return {}


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _name(holder: dict[str, Any]) -> str:
    parts = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
    since = holder.get("since")
    when = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(since)) if since else ""
    return f"{parts}{when}"


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _machine() -> str:
    """What one running kernel is known by: containers share it, a restarted host has another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
