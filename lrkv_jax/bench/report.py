"""What a benchmark writes down: one row a measurement, and the machine it was taken on."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib

import lrkv_jax
from lrkv_jax.bench.lines import name_of
from lrkv_jax.errors import LrkvError

MEASURED, SKIPPED, WRONG, FAILED = "measured", "skipped", "wrong", "failed"

Progress = Callable[[str, int, int], None]  # what is measured, how many are done, of how many


def silent(text: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@dataclass
class Row:
    """One implementation of one variant at one shape. Times are seconds until they are reported."""

    level: str  # attention, layer or step
    scale: str
    variant: str
    rope: str | None  # LRKV's mode
    implementation: str
    batch: int
    length: int  # slots a sequence; the longest one's tokens
    ragged: bool
    tokens: int  # in the cache, over all sequences
    dtype: str
    layers: int = 1  # that the time is of
    status: str = MEASURED
    reason: str | None = None  # why it was not measured
    error: float | None = None  # from the oracle, relative
    checked: str | None = None
    samples: int = 0
    us: float | None = None  # median microseconds
    us_first_quartile: float | None = None
    us_third_quartile: float | None = None
    tokens_per_second: float | None = None  # of a whole step alone
    bytes_to_move: int | None = None  # of the cache
    bytes_per_second: float | None = None
    share_of_copy: float | None = None
    time_over_mha: float | None = None  # the fastest MHA of the same run and shape
    bytes_over_mha: float | None = None
    temp_bytes: int | None = None  # the program's temporary memory

    @property
    def name(self) -> str:
        """mha, lrkv full."""
        return name_of(self.variant, self.rope)

    @property
    def shape(self) -> tuple:
        """What rows must share to be compared."""
        return self.level, self.scale, self.batch, self.length, self.ragged, self.layers


def fastest_mha(rows: Sequence[Any], time: Callable[[Any], float]) -> dict[tuple, Any]:
    """The measured MHA row of least `time` at each `row.shape`."""
    best: dict[tuple, Any] = {}
    for row in rows:
        mha = row.variant == "mha" and row.status == MEASURED
        if mha and (row.shape not in best or time(row) < time(best[row.shape])):
            best[row.shape] = row
    return best


def compare_with_mha(rows: list[Row]) -> None:
    """Fill in each measured row's time and bytes over those of the fastest MHA at its shape."""
    best = fastest_mha(rows, lambda row: row.us)
    for row in rows:
        if row.status == MEASURED and row.shape in best:
            row.time_over_mha = row.us / best[row.shape].us
            row.bytes_over_mha = row.bytes_to_move / best[row.shape].bytes_to_move


def exact_shares(rows: list[Row]) -> list[dict[str, Any]]:
    """What exact RoPE costs LRKV: (full − shared) / full, where both modes were measured alike.

    The two differ in nothing else: the same cache, the same bytes.
    """
    shares = []
    of = {
        (row.shape, row.implementation, row.name): row
        for row in rows
        if row.status == MEASURED and row.implementation != "naive"
    }
    for (shape, implementation, name), full in of.items():
        shared = of.get((shape, implementation, "lrkv shared"))
        if name == "lrkv full" and shared is not None:
            shares.append(
                {
                    "level": full.level,
                    "scale": full.scale,
                    "batch": full.batch,
                    "length": full.length,
                    "ragged": full.ragged,
                    "implementation": implementation,
                    "share_of_full": (full.us - shared.us) / full.us,
                }
            )
    return shares


def machine() -> dict[str, Any]:
    """Where and with what: device, versions, date, command, and how busy the machine was."""
    device = jax.devices()[0]
    return {
        "backend": jax.default_backend(),
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "cores": os.process_cpu_count() if sys.version_info >= (3, 13) else os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": {
            "lrkv_jax": lrkv_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([_program(), *sys.argv[1:]]),
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "lrkv" if name == "__main__.py" else name


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "cpu"


def reason_of(error: Exception) -> tuple[str, str]:
    """(status, reason in one line): what cannot run here said so, anything else is a failure."""
    if isinstance(error, LrkvError):
        return SKIPPED, str(error)
    first = (str(error).splitlines() or [""])[0]
    return FAILED, f"{type(error).__name__}: {first}"[:200]


def as_json(report: dict[str, Any]) -> dict[str, Any]:
    """The report with its rows as plain dictionaries."""
    return {**report, "rows": [asdict(row) for row in report["rows"]]}
