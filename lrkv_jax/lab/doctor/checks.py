"""The process that runs the doctor's checks, one after another, and prints JSON lines.

A line says which check begins, what it begins within, or what it found. A later check may depend on
what an earlier one measured, as on how many devices there are.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.doctor import finding, machine, versions
from lrkv_jax.lab.doctor.finding import SLOW, WRONG, Finding

DISK_SECONDS = 1.5
Facts = dict[str, dict[str, Any]]  # what each line measured, by its name

DISK = "start in a folder on another disk, and name a run_dir there"
INSTALL = 'pip install -c constraints.txt -e ".[dev]", or ".[cuda13]" for GPUs'
DRIVER = "load or reinstall NVIDIA's driver, then restart the machine"
DEVICES = "see the lines on the driver and the packages; JAX_PLATFORMS=cpu does without GPUs"
DEVICE = (
    "look at its clocks, power and heat (nvidia-smi -q, dmesg); CUDA_VISIBLE_DEVICES leaves it out"
)
LINKS = "look at the links (nvidia-smi topo -m, NCCL_DEBUG=INFO)"


class Check(NamedTuple):
    """A check that may take `seconds`; `fix` is for a finding that names no other."""

    name: str
    seconds: float
    fix: str
    run: Callable[[], Finding | list[Finding]]


def checks(facts: Facts) -> Iterator[Check]:
    """Every check, in order; `facts` fills while they run."""
    disk = partial(machine.disk, os.getcwd(), DISK_SECONDS)
    yield Check("cores", 10, "end other programs: they slow all that follows", machine.cores)
    yield Check("memory", 10, "end other programs, or ask for more memory", machine.memory)
    yield Check("disk", 20, DISK, disk)
    yield Check("driver", 15, DRIVER, versions.driver)
    gpus = facts["driver"].get("gpus", 0)
    yield Check("packages", 10, INSTALL, partial(versions.packages, gpus))
    # Imported here: what is above needs no JAX, which may not load.
    from lrkv_jax.lab.doctor import devices

    yield Check("devices", 45, DEVICES, partial(devices.devices, gpus))
    found = facts["devices"]
    count = found.get("count", 0)
    for index in range(min(count, 1) if found.get("backend") == "cpu" else count):
        yield Check(f"device {index}", 30, DEVICE, partial(devices.speed, index))
    if count > 1:
        yield Check(f"all-reduce of {count}", 30, LINKS, devices.between)


def answer(check: Check) -> list[Finding]:
    """The findings of a check; what it raises becomes one."""
    try:
        found = check.run()
    except LrkvError as error:
        return [Finding(check.name, WRONG, str(error))]
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            text = f"too little memory: {text}"
        return [Finding(check.name, WRONG, f"{type(error).__name__}: {text[:200]}", check.fix)]
    bad = (SLOW, WRONG)
    return [
        replace(one, fix=one.fix or check.fix) if one.verdict in bad else one
        for one in (found if isinstance(found, list) else [found])
    ]


def run(which: Callable[[Facts], Iterable[Check]] = checks) -> None:
    """Run the checks; what they and their libraries print on stdout goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(**what: Any) -> None:
        print(json.dumps(what), file=output, flush=True)

    finding.on_progress = lambda what: send(at=what)
    facts: Facts = defaultdict(dict)
    for check in which(facts):
        send(begin=check.name, seconds=check.seconds, fix=check.fix)
        found = answer(check)
        facts.update({one.name: one.measured for one in found})
        send(found=[asdict(one) for one in found])


def _end_with_parent() -> None:
    """The parent's end closes this input, even if it was killed."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    run()
