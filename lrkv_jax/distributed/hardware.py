"""Devices: what this process computes on, and what those that runs are planned for can do.

Datasheets' figures, in decimal units: a GB is 10⁹ bytes. A driver shows 5 to 7 % more memory than
the sheet's decimal gigabytes (an H200's 141 GB are 141 · 2³⁰ bytes before error correction and the
driver's share), and takes some of it for its context and the collectives' buffers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from lrkv_jax.errors import LrkvError

CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Hardware:
    """One device's limits. Bandwidths are in one direction, bytes/s; the peak is dense."""

    name: str
    kind: str  # what JAX calls such a device; a PCIe card or a part of one has another name
    memory: int  # bytes of HBM
    memory_bandwidth: float  # bytes/s
    bf16_flops: float  # FLOP/s of dense bfloat16 products with float32 sums
    link_bandwidth: float  # bytes/s to the other devices of its node
    node: int  # devices that the fast link joins
    source: str


HARDWARE = {
    "a100": Hardware(
        "A100 80GB SXM", "NVIDIA A100-SXM4-80GB", 80 * 10**9, 2.039e12, 312e12, 300e9, 8,
        "NVIDIA A100 Tensor Core GPU datasheet, June 2021 (SXM column; NVLink 600 GB/s both ways)",
    ),
    "h100": Hardware(
        "H100 SXM", "NVIDIA H100 80GB HBM3", 80 * 10**9, 3.35e12, 989.5e12, 450e9, 8,
        "NVIDIA H100 Tensor Core GPU datasheet, 2023 (SXM column; 1,979 TFLOPS with sparsity, "
        "NVLink 900 GB/s both ways)",
    ),
    "h200": Hardware(
        "H200 SXM", "NVIDIA H200", 141 * 10**9, 4.8e12, 989.5e12, 450e9, 8,
        "NVIDIA H200 Tensor Core GPU datasheet, November 2023 (SXM column; 1,979 TFLOPS with "
        "sparsity, NVLink 900 GB/s both ways)",
    ),
    "b200": Hardware(
        "B200", "NVIDIA B200", 180 * 10**9, 8e12, 2250e12, 900e9, 8,
        "NVIDIA DGX B200 datasheet, 2024, over its eight GPUs (1,440 GB, 64 TB/s, 14.4 TB/s of "
        "NVLink both ways); NVIDIA Blackwell Architecture Technical "
        "Brief, 2024 (2.25 PFLOPS dense)",
    ),
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """The device of that name; raises `LrkvError` for one that is not in the table."""
    try:
        return HARDWARE[name.lower()]
    except KeyError:
        raise LrkvError(f"hardware {name!r} is unknown: use {', '.join(HARDWARE)}") from None


def hardware_of(device_kind: str) -> Hardware | None:
    """The table's entry for what JAX calls a device ("NVIDIA H200"), or None."""
    return next((entry for entry in HARDWARE.values() if entry.kind == device_kind), None)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> tuple[int, int]:
    """The bytes of memory that this process may use and those of them that are free.

    The page cache counts as free, and a control group's limit counts.
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024 * int(fields[n].split()[0]) for n in ("MemTotal", "MemAvailable"))
    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        with contextlib.suppress(OSError):  # a file's pages are given back before the limit ends it
            lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
            used -= int(dict(line.split() for line in lines).get("inactive_file", 0))
        total, free = min(total, limit), min(free, limit - used)
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return total, free


@functools.cache
def device_name() -> str:
    """JAX's first device by its kind; a CPU by its processor, as in "AMD EPYC, family 25 model 17".

    Virtual machines shorten a processor's name; its family and model identify it.
    """
    import jax  # a caller that only counts cores does not need it

    device = jax.devices()[0]
    return _processor() if device.platform == "cpu" else device.device_kind


def _processor() -> str:
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = found.get("model name") or platform.processor() or "cpu"
    if {"cpu family", "model"} <= found.keys():
        name += f", family {found['cpu family']} model {found['model']}"
    return name
