"""The machine around the devices: cores, memory and disk. Nothing here loads JAX."""

import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from lrkv_jax.distributed.device import usable_cores
from lrkv_jax.lab.doctor.finding import SLOW, WRONG, Finding, judged

# A process that trains the smallest configuration takes 1.2 GB; reading records, a few more.
LEAST_MEMORY, LITTLE_MEMORY = 2 << 30, 6 << 30
LEAST_DISK = 2 << 30  # a checkpoint of the 128M model is 1.6 GB
SLOW_DISK = 100e6  # bytes/s: that checkpoint then takes 16 s
SLOW_FILE = 0.1  # seconds until a small file is on the disk; every checkpoint has dozens
CHUNK = 8 << 20
TIMES = 8


def cores() -> Finding:
    """The processors of this process, and how busy the machine is."""
    count, load = usable_cores(), os.getloadavg()[0]
    faults = {f"a load of {load:.1f}": SLOW} if load > 2 * count else {}
    says = f"{count} cores ({platform.machine()}), load {load:.1f}"
    return judged("cores", faults, says, {"cores": count, "load": load})


def memory() -> Finding:
    """The memory that this process may still take, its control group's limit included."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024 * int(fields[n].split()[0]) for n in ("MemTotal", "MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        total, free = (
            min(total, limit),
            min(free, limit - int((group / "memory.current").read_text())),
        )
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return check_memory(total, free)


def check_memory(total: int, free: int) -> Finding:
    """Bytes that the machine has, and those that are free."""
    says = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    faults = {}
    if free < LITTLE_MEMORY:
        need = f"a run takes {LEAST_MEMORY / 1e9:.0f} to {LITTLE_MEMORY / 1e9:.0f} GB"
        faults = {f"too little memory, {need}": WRONG if free < LEAST_MEMORY else SLOW}
    return judged("memory", faults, says, {"total_bytes": total, "free_bytes": free})


def disk(folder: str, lasting: float) -> Finding:
    """Writes into a folder, twice for about `lasting` seconds: large pieces, and small files."""
    rates: list[float] = []
    waits: list[float] = []
    free = shutil.disk_usage(folder).free
    with tempfile.TemporaryDirectory(prefix=".lrkv-doctor-", dir=folder) as place:
        path, began = Path(place, "file"), time.perf_counter()
        piece = os.urandom(min(CHUNK, free // 100))
        while len(rates) < 2 or (time.perf_counter() - began < lasting and len(rates) < 32):
            rates.append(len(piece) / _written(path, piece))
        while len(waits) < 2 or (time.perf_counter() - began < 2 * lasting and len(waits) < TIMES):
            waits.append(_written(path, b"lrkv"))
    rate, wait = statistics.median(rates), statistics.median(waits)
    says = f"{rate / 1e6:.0f} MB/s, {1e3 * wait:.1f} ms a small file, {free / 1e9:.0f} GB free"
    faults = {}
    if free < LEAST_DISK:
        faults["too little room for a checkpoint"] = WRONG
    if rate < SLOW_DISK:
        faults[f"under {SLOW_DISK / 1e6:.0f} MB/s"] = SLOW
    if wait > SLOW_FILE:
        faults[f"over {1e3 * SLOW_FILE:.0f} ms a small file"] = SLOW
    measured = {"bytes_per_second": rate, "small_file_seconds": wait, "free_bytes": free}
    return judged("disk", faults, says, measured)


def _written(path: Path, data: bytes) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began
