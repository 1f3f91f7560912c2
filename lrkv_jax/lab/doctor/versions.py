"""The versions of what is installed and driven, against what asks for them; no JAX is loaded.

CUDA's libraries are checked as wheels; JAX's plugin itself refuses to load older ones than it was
built with.
"""

import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from lrkv_jax.lab.doctor.finding import NOT_HERE, SLOW, WRONG, Finding, judged

PLUGINS = {"jax-cuda13-plugin": 13, "jax-cuda12-plugin": 12}
# CUDA Toolkit release notes, minimum driver for minor-version compatibility.
OLDEST_DRIVER = {12: 525, 13: 580}
# Named by the line of the report; the others by their number alone.
SHOWN = ("jax", "jaxlib", "flax", "optax")
LIBRARIES = ("nvidia-cuda-runtime", "nvidia-cudnn", "nvidia-nccl")
QUERY = ("name", "driver_version", "memory.total", "memory.used", "temperature.gpu")


def packages(gpus: int) -> Finding:
    """Installed packages against what this one, JAX and its CUDA plugin ask for.

    `gpus` is how many the driver shows. Without any of CUDA's wheels, the plugin uses the machine's
    libraries, of which nothing is known here.
    """
    plugin = next((name for name in PLUGINS if _version(name)), None)
    wanted = [*wanted_by("lrkv-jax"), *wanted_by("jax")]
    if plugin is not None:
        wheels = list(wanted_by(plugin, extra="with-cuda"))
        nvidia = any(_version(one.name) for _, one in wheels if one.name.startswith("nvidia-"))
        wanted += wheels if nvidia else []
    faults = {}
    if gpus and plugin is None:
        faults[f"{gpus} GPUs, and JAX has no CUDA plugin: it computes on the CPU"] = WRONG
    found = {one.name: _version(one.name) for _, one in wanted}
    for by, one in wanted:
        version = found[one.name]
        if version is None:
            faults[f"{one.name} is missing, and {by} wants it"] = WRONG
        elif not one.specifier.contains(version, prereleases=True):
            faults[f"{one.name} is {version}, and {by} wants {one.specifier}"] = WRONG
    here = {name: version for name, version in found.items() if version}
    shown = [f"{n} {v}" for n, v in here.items() if n in SHOWN or n.startswith(LIBRARIES)]
    return judged("packages", faults, ", ".join(shown), here)


def wanted_by(distribution: str, extra: str = "") -> Iterator[tuple[str, Requirement]]:
    """(distribution, requirement) of its metadata, those of one of its extras included."""
    for line in metadata.requires(distribution) or () if _version(distribution) else ():
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield distribution, one


def driver() -> Finding:
    """NVIDIA's driver and what it says of its GPUs: memory in use, temperature."""
    name, here = "driver", any(map(Path.exists, map(Path, ("/dev/nvidiactl", "/dev/nvidia0"))))
    program = shutil.which("nvidia-smi")
    if program is None:
        if here:
            fix = "install the driver's tools, or let the container see them"
            return Finding(name, WRONG, "there is an NVIDIA device and no nvidia-smi", fix)
        return Finding(name, NOT_HERE, "no NVIDIA GPU")
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    gpus = [line for line in lines if len(line) == len(QUERY)]
    if done.returncode or not gpus:
        printed = " ".join((done.stderr or done.stdout).split())[:200]
        return Finding(name, WRONG, f"nvidia-smi ends with {done.returncode}: {printed}")
    return check_driver(gpus, next((PLUGINS[p] for p in PLUGINS if _version(p)), None))


def check_driver(gpus: list[list[str]], cuda: int | None) -> Finding:
    """The driver's lines of `QUERY`, one per GPU, against what CUDA's major version needs."""
    kind, version = gpus[0][:2]
    faults = {}
    if cuda and Version(version).major < OLDEST_DRIVER[cuda]:
        oldest = OLDEST_DRIVER[cuda]
        faults[f"the driver is {version}, and CUDA {cuda} needs {oldest} or newer"] = WRONG
    for index, (_, _, total, used, _) in enumerate(gpus):
        if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
            faults[f"{int(used) / 1024:.0f} GiB of GPU {index} are in use by others"] = SLOW
    fix = "install a newer driver" if WRONG in faults.values() else "end what else uses the GPUs"
    hottest = max((gpu[4] for gpu in gpus if gpu[4].isdecimal()), key=int, default="?")
    says = f"{len(gpus)} x {kind}, driver {version}, {hottest} degrees C"
    return judged("driver", faults, says, {"gpus": len(gpus), "driver": version}, fix)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
