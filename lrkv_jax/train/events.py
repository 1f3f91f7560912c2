"""Scalars for TensorBoard, written in the calling thread.

tensorboardX's own writer hands them to a thread through a short queue. When that thread dies of a
full disk, the queue fills and the next scalar waits for ever: the run with it. Its message formats
and checksum are used, its threads are not.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c


class Events:
    """One event file in `directory`; scalars from `purge_step` on in older ones are void.

    Raises `OSError` where the disk takes nothing; a torn record ends the file for its readers, so
    the writer stays closed after that.
    """

    def __init__(self, directory: Path, *, purge_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        stamp = time.time_ns()  # two starts within a second are two files
        name = f"events.out.tfevents.{stamp // 10**9}.{stamp % 10**9:09d}.{socket.gethostname()}"
        self._file = (directory / name).open("ab", buffering=0)
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Several scalars of one step."""
        if self._file.closed:
            return
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        data = event.SerializeToString()
        header = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (header, data))
        record = header + next(sums) + data + next(sums)
        try:
            whole = self._file.write(record) == len(record)
        except OSError:
            self._file.close()
            raise
        if not whole:
            self._file.close()
            raise OSError(28, "No space left on device", self._file.name)
