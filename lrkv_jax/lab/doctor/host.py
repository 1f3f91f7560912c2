"""The machine around the devices: cores, memory, disk, driver and packages; no JAX is loaded.

`checks` lists every check in order: a later one may depend on what an earlier one measured.
"""

import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from lrkv_jax.distributed.hardware import host_memory, usable_cores
from lrkv_jax.lab.doctor.examine import NOT_HERE, SLOW, WRONG, Check, Facts, Finding, judged

# A process that trains the smallest configuration takes 1.2 GB; reading records, a few more.
LEAST_MEMORY, LITTLE_MEMORY = 2 << 30, 6 << 30
LEAST_DISK = 2 << 30  # a checkpoint of the 128M model is 1.6 GB
SLOW_DISK = 100e6  # bytes/s: that checkpoint then takes 16 s
CHUNK = 8 << 20
DISK_SECONDS = 1.5

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
SHOWN = ("jax", "jaxlib", "flax", "optax", "nvidia-cudnn", "nvidia-nccl")
QUERY = ("name", "driver_version", "memory.total", "memory.used")


def machine() -> Finding:
    """The cores and memory that this process may use."""
    return check_machine(usable_cores(), os.getloadavg()[0], *host_memory())


def check_machine(cores: int, load: float, total: int, free: int) -> Finding:
    """The machine's load, and its bytes of memory."""
    faults = {f"a load of {load:.1f}": SLOW} if load > 2 * cores else {}
    if free < LITTLE_MEMORY:
        need = f"a run takes {LEAST_MEMORY / 1e9:.0f} to {LITTLE_MEMORY / 1e9:.0f} GB"
        verdict = WRONG if free < LEAST_MEMORY else SLOW
        faults[f"too little memory, {need}"] = verdict
    text = f"{cores} cores ({platform.machine()}), load {load:.1f}, "
    text += f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    measured = {"cores": cores, "load": load, "total_bytes": total, "free_bytes": free}
    return judged("machine", faults, text, measured)


def disk(folder: str = ".", lasting: float = DISK_SECONDS) -> Finding:
    """Writes into a folder for about `lasting` seconds, each until it is on the disk."""
    rates: list[float] = []
    free = shutil.disk_usage(folder).free
    piece, began = os.urandom(min(CHUNK, free // 100)), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:  # it has no name to leave behind
        while len(rates) < 2 or time.perf_counter() - began < lasting:
            start = time.perf_counter()
            file.seek(0)
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            rates.append(len(piece) / (time.perf_counter() - start))
    rate = statistics.median(rates)
    faults = {}
    if free < LEAST_DISK:
        faults["too little room for a checkpoint"] = WRONG
    if rate < SLOW_DISK:
        faults[f"under {SLOW_DISK / 1e6:.0f} MB/s"] = SLOW
    text = f"{rate / 1e6:.0f} MB/s, {free / 1e9:.0f} GB free"
    return judged("disk", faults, text, {"bytes_per_second": rate, "free_bytes": free})


def driver() -> Finding:
    """NVIDIA's driver, its GPUs, and how much of their memory is in use."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if Path("/dev/nvidiactl").exists():
            return Finding("driver", WRONG, "there is an NVIDIA device and no nvidia-smi")
        return Finding("driver", NOT_HERE, "no NVIDIA GPU")
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    gpus = [line for line in lines if len(line) == len(QUERY)]
    if done.returncode or not gpus:
        printed = " ".join((done.stderr or done.stdout).split())[:200]
        return Finding("driver", WRONG, f"nvidia-smi ends with {done.returncode}: {printed}")
    kind, version = gpus[0][:2]
    faults = {}
    for index, (_, _, total, used) in enumerate(gpus):
        if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
            faults[f"{int(used) / 1024:.0f} GiB of GPU {index} are in use by others"] = SLOW
    text = f"{len(gpus)} x {kind}, driver {version}"
    return judged("driver", faults, text, {"gpus": len(gpus), "driver": version})


def packages(gpus: int) -> Finding:
    """Installed packages against the requirements of this one, JAX and its CUDA plugin.

    `gpus` is how many the driver shows. A requirement without a wheel is the machine's.
    """
    plugins = [name for name in PLUGINS if _version(name)]
    faults = {}
    if gpus and not plugins:
        faults[f"{gpus} GPUs, and JAX has no CUDA plugin: it computes on the CPU"] = WRONG
    found: dict[str, str | None] = {}
    for by in ("lrkv-jax", "jax", *plugins):
        for one in _wanted_by(by):
            version = found[one.name] = _version(one.name)
            if version is None and by not in plugins:
                faults[f"{one.name} is missing, and {by} wants it"] = WRONG
            elif version and not one.specifier.contains(version, prereleases=True):
                faults[f"{one.name} is {version}, and {by} wants {one.specifier}"] = WRONG
    here = {name: version for name, version in found.items() if version}
    shown = ", ".join(f"{name} {here[name]}" for name in here if name.startswith(SHOWN))
    return judged("packages", faults, shown, here)


def _wanted_by(distribution: str) -> Iterator[Requirement]:
    """The requirements of an installed distribution, with the libraries of a CUDA plugin."""
    for line in metadata.requires(distribution) or () if _version(distribution) else ():
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": "with-cuda"}):
            yield one


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def checks(facts: Facts) -> Iterator[Check]:
    """Every check, in order; `facts` fills while they run."""
    programs = "end other programs, or ask for more memory"
    yield Check("machine", 10, programs, machine)
    yield Check("disk", 20, "start in a folder on another disk, and name a run_dir there", disk)
    reload = "load or reinstall NVIDIA's driver, and end what else uses the GPUs"
    yield Check("driver", 15, reload, driver)
    gpus = facts["driver"].get("gpus", 0)
    install = 'pip install -c constraints.txt -e ".[dev]", or ".[cuda13]" for GPUs'
    yield Check("packages", 10, install, partial(packages, gpus))
    # Imported here: what is above needs no JAX, which may not load.
    from lrkv_jax.lab.doctor import devices

    seen = "see the lines on the driver and the packages; JAX_PLATFORMS=cpu does without GPUs"
    yield Check("devices", 45, seen, partial(devices.devices, gpus))
    found = facts["devices"]
    count = found.get("count", 0)
    clocks = "look at its clocks, power and heat (nvidia-smi -q, dmesg)"
    for index in range(min(count, 1) if found.get("backend") == "cpu" else count):
        yield Check(f"device {index}", 30, clocks, partial(devices.speed, index))
    if count > 1:
        links = "look at the links (nvidia-smi topo -m, NCCL_DEBUG=INFO)"
        yield Check(f"all-reduce of {count}", 30, links, devices.between)
