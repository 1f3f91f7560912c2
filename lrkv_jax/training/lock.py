"""One trainer per run directory.

The file `lock` in the run's directory names its holder and is locked by it (`fcntl.lockf`: the
kernel, or an NFS server, frees it when the process ends; children do not inherit it). On a file
system that passes no locks between hosts, a second trainer is only seen on the same host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.run_dir import unusable

_IS_HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """The right to train in a directory; use as a context manager around `take`.

    Of several `processes`, process 0 holds it for all.
    """

    def __init__(self, run_dir: str | Path, processes: Processes):
        self.path, self._processes = Path(run_dir) / "lock", processes
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._file)  # frees it
            self._file = None

    def take(self, *, if_there: bool = False) -> None:
        """Take the lock, unless this process has it; with `if_there` only where its file exists.

        Raises `LrkvError`, in all processes, while somebody else holds it.
        """
        with self._processes.together():
            if self._processes.index or self._file is not None:
                return
            if if_there and not os.path.exists(self.path):
                return
            try:
                self._file = self._locked()
            except OSError as error:
                raise unusable(self.path.parent, error) from error

    def _locked(self) -> int:
        """A descriptor of the file, locked by this process where the file system has locks."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _IS_HELD:
                holder = os.pread(file, 4096, 0).decode(errors="replace").strip()
                os.close(file)
                raise LrkvError(
                    f"{self.path.parent} is being trained by {holder or 'another process'}: wait "
                    "for it to end, or give this run its own run_dir=PATH"
                ) from None
            # The file system has no locks: nothing keeps a second trainer away.
        if not self._is_at_its_path(file):  # its holder has ended, and removed it, meanwhile
            os.close(file)
            return self._locked()
        with contextlib.suppress(OSError):  # a full disk: the kernel's lock remains
            os.truncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return file

    def _is_at_its_path(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False
