"""Where the time goes between the command and the first finished step."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Startup:
    """A stopwatch of phases that follow each other on the main thread.

    `Startup.of_the_process()` counts from the command; `Startup()` from now, as a caller from
    Python wants it.
    """

    def __init__(self, already: float = 0.0):
        self.began = self._last = time.monotonic() - already  # of time.monotonic
        self.phases: dict[str, float] = {}

    @classmethod
    def of_the_process(cls) -> Startup:
        """From when the operating system started this process; from now where it does not say."""
        ticks = _started()
        if ticks is None:
            return cls()
        return cls(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))

    def phase(self, name: str) -> None:
        """The time since the last phase was this one."""
        now = time.monotonic()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        return self._last - self.began

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        return f"first step after {self.seconds:.1f} s: {parts}"

    def row(self) -> dict[str, float]:
        """The same for a row of metrics: seconds of each phase and of all."""
        phases = {f"startup_{name.replace(' ', '_')}": s for name, s in self.phases.items()}
        return {"startup_seconds": self.seconds, **phases}


def _started() -> int | None:
    """When this process was started, in ticks since the host was; None where /proc is missing."""
    try:
        # The command's name may hold spaces and brackets; the fields after it do not.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])  # field 22 of them all
    except (OSError, IndexError, ValueError):
        return None
