"""What this process computes on, as results name it."""

from __future__ import annotations

import functools
import os
import platform


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def device_name() -> str:
    """JAX's first device by its kind; a CPU by its processor, as in "AMD EPYC, family 25 model 17".

    Virtual machines shorten a processor's name, and its family and model tell what it is.
    """
    import jax  # what asks for cores alone does not need it

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
