"""The examination: which checks there are, in which order, and what is said of all.

A later check may depend on what an earlier one measured, as on how many devices there are.
"""

import datetime
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lrkv_jax import __version__
from lrkv_jax.lab.doctor.child import Check, ask, checker
from lrkv_jax.lab.doctor.finding import SLOW, WRONG, Finding

DISK_SECONDS = 1.5
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all")
Facts = dict[str, dict[str, Any]]  # what each line measured, by its name

INSTALL = 'pip install -c constraints.txt -e ".[{}]"'
DISK = "start in a folder on another disk, and name a run_dir there"
DRIVER = "load or reinstall NVIDIA's driver, then restart the machine"
DEVICES = "see the lines on the driver and CUDA; JAX_PLATFORMS=cpu does without GPUs"
DEVICE = (
    "look at its clocks, power and heat (nvidia-smi -q, dmesg); CUDA_VISIBLE_DEVICES leaves it out"
)
LINKS = "look at the links (nvidia-smi topo -m, NCCL_DEBUG=INFO)"


def checks(facts: Facts) -> Iterator[Check]:
    """Every check, in order; `facts` fills while they run."""
    here = {"folder": os.getcwd()}
    yield _check("cores", "machine:cores", 10, "end other programs: they slow all that follows")
    yield _check("memory", "machine:memory", 10, "end other programs, or ask for more memory")
    yield _check("disk", "machine:disk", 20, DISK, **here, lasting=DISK_SECONDS)
    yield _check("packages", "versions:packages", 10, INSTALL.format("dev"))
    yield _check("driver", "versions:driver", 15, DRIVER)
    gpus = facts["driver"].get("gpus", 0)
    install = INSTALL.format("cuda13")
    yield _check("CUDA wheels", "versions:cuda_wheels", 10, install, gpus=gpus)
    yield _check("devices", "devices:devices", 45, DEVICES, gpus=gpus)
    mend = f"{install}, without other CUDA libraries in LD_LIBRARY_PATH"
    yield _check("CUDA loaded", "versions:loaded", 20, mend)
    if count := facts["devices"].get("count", 0):
        yield from _on_devices(facts, count)


def _on_devices(facts: Facts, count: int) -> Iterator[Check]:
    """The checks of `count` devices that have answered; a CPU's are one."""
    on_cpu = facts["devices"]["backend"] == "cpu"
    for index in range(1 if on_cpu else count):
        yield _check(f"device {index}", "devices:speed", 30, DEVICE, index=index)
    for kind in COLLECTIVES if count > 1 else ():
        yield _check(f"{kind} of {count}", "devices:between", 30, LINKS, kind=kind)


def _check(name: str, function: str, seconds: float, mend: str, **arguments: Any) -> Check:
    return Check(name, f"lrkv_jax.lab.doctor.{function}", seconds, mend, arguments)


def examine(
    show: Callable[[Finding], None],
    which: Callable[[Facts], Iterable[Check]] = checks,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Run the checks, show each finding as it comes, and return the report, ready for JSON.

    What has not begun after `seconds` is named, and not run.
    """
    began, found = time.monotonic(), []
    facts: Facts = defaultdict(dict)
    with checker() as child:
        for check in which(facts):
            for one in ask(child, check, seconds - (time.monotonic() - began)):
                facts[one.name] = one.measured
                found.append(one)
                show(one)
    return {
        "doctor": verdict(found),
        "seconds": time.monotonic() - began,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "device": facts["devices"].get("kind"),
        "versions": {
            "lrkv_jax": __version__,
            "python": platform.python_version(),
            **{name: facts["packages"].get(name) for name in ("jax", "jaxlib")},
        },
        "findings": [_strict(vars(one)) for one in found],
    }


def _strict(value: Any) -> Any:
    """The value as JSON has it: no infinities."""
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(found: Iterable[Finding]) -> str:
    """The worst of all, or `right`."""
    verdicts = {one.verdict for one in found}
    return next((v for v in (WRONG, SLOW) if v in verdicts), "right")


def sentence(report: dict[str, Any]) -> str:
    """The last line: how many lines are wrong or slow."""
    counts = {v: sum(f["verdict"] == v for f in report["findings"]) for v in (WRONG, SLOW)}
    after = f"{report['seconds']:.0f} s"
    if not any(counts.values()):
        return f"This machine is right for the work ({after})."
    lines = " and ".join(f"{n} {v}" for v, n in counts.items() if n)
    mend = "mend what is wrong first" if counts[WRONG] else "it works, and may work faster"
    return f"{lines} of {len(report['findings'])} lines ({after}): {mend}."
