"""The versions of what is installed, loaded and driven, against what asks for them.

Wheels are read from their metadata, libraries by what CUDA's plugin of JAX loads. Nothing here
loads JAX but `loaded`.
"""

import importlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from lrkv_jax.lab.doctor.finding import NOT_HERE, SLOW, WRONG, Finding, judged

PLUGINS = {"jax-cuda13-plugin": 13, "jax-cuda12-plugin": 12}
# CUDA Toolkit release notes, minimum driver for minor-version compatibility.
OLDEST_DRIVER = {12: (525,), 13: (580,)}
# Named by the line of the report; the others by their number alone.
SHOWN = ("cuda-runtime", "cudnn", "nccl", "cublas")
QUERY = ("name", "driver_version", "memory.total", "memory.used", "temperature.gpu")


class Wanted(NamedTuple):
    """What `by` asks of a distribution: its `versions`, as in `>=9.12,<10`."""

    name: str
    versions: str
    by: str


def packages() -> Finding:
    """The Python packages, against what this one and JAX ask for."""
    wanted = [*wanted_by("lrkv-jax"), *wanted_by("jax")]
    found = {one.name: _version(one.name) for one in wanted}
    shown = {name: found.get(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return check_versions("packages", found, wanted, shown)


def cuda_wheels(gpus: int) -> Finding:
    """CUDA's libraries as wheels, against what JAX's plugin asks for; `gpus` is how many there are.

    Without any such wheel the libraries are those of the machine, which `loaded` looks at.
    """
    name = "CUDA wheels"
    plugins = [plugin for plugin in PLUGINS if _version(plugin)]
    if not plugins:
        if not gpus:
            return Finding(name, NOT_HERE, "no GPU and no CUDA plugin of JAX")
        says = f"{gpus} GPUs, and JAX has no CUDA plugin: it computes on the CPU"
        return Finding(name, WRONG, says)
    plugin = plugins[0]
    wanted = list(wanted_by(plugin, extra="with-cuda"))
    wanted += [one for one in wanted_by(plugin) if one not in wanted]
    found = {one.name: _version(one.name) for one in wanted}
    libraries = {n: v for n, v in found.items() if n.startswith("nvidia-")}
    if not any(libraries.values()):
        return Finding(name, NOT_HERE, f"{plugin} uses the machine's own CUDA libraries")
    shown = {n: v for n, v in libraries.items() if any(word in n for word in SHOWN)}
    shown = {plugin: _version(plugin)} | shown
    return check_versions(name, found, wanted, shown)


def check_versions(
    name: str,
    found: Mapping[str, str | None],
    wanted: Iterable[Wanted],
    shown: Mapping[str, str | None],
) -> Finding:
    """Whether each version that was found is one of those wanted; None is not installed."""
    faults = {}
    for one in wanted:
        version = found.get(one.name)
        if version is None:
            faults[f"{one.name} is missing, and {one.by} wants it"] = WRONG
        elif not allows(one.versions, version):
            faults[f"{one.name} is {version}, and {one.by} wants {one.versions}"] = WRONG
    says = ", ".join(f"{n} {v}" for n, v in shown.items() if v)
    return judged(name, faults, says, {n: v for n, v in found.items() if v})


def allows(versions: str, version: str) -> bool:
    """Whether a version is one of `>=9.12,<10`; comparisons but the usual six are ignored."""
    here = _numbers(version)
    for sign, limit in re.findall(r"(==|>=|<=|!=|<|>)\s*([\d.]+)", versions):
        there = _numbers(limit)
        width = max(len(here), len(there))
        a, b = (n + (0,) * (width - len(n)) for n in (here, there))
        if sign == "==" and f"{limit}*" in versions:  # 1.2.* names the beginning
            a = a[: len(there)]
            b = there
        good = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not good[sign]:
            return False
    return True


def wanted_by(distribution: str, extra: str | None = None) -> Iterable[Wanted]:
    """What a distribution's metadata asks for: always, or with one of its extras."""
    for line in metadata.requires(distribution) or () if _version(distribution) else ():
        text, _, marker = line.partition(";")
        if (f'"{extra}"' in marker) if extra else not marker.strip():
            name = re.match(r"[\w.-]+", text)[0]
            versions = re.sub(r"^\[.*?\]", "", text[len(name) :].strip(" ")).strip("() ")
            yield Wanted(name.lower().replace("_", "-"), versions, distribution)


def driver() -> Finding:
    """NVIDIA's driver and what it says of its GPUs: memory in use, temperature."""
    name, here = "driver", any(map(Path.exists, map(Path, ("/dev/nvidiactl", "/dev/nvidia0"))))
    program = shutil.which("nvidia-smi")
    if program is None:
        if here:
            mend = "install the driver's tools, or let the container see them"
            return Finding(name, WRONG, "there is an NVIDIA device and no nvidia-smi", mend)
        return Finding(name, NOT_HERE, "no NVIDIA GPU")
    asked = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace")
    rows = [
        row.split(", ") for row in done.stdout.splitlines() if row.count(", ") == len(QUERY) - 1
    ]
    if done.returncode or not rows:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        return Finding(name, WRONG, f"nvidia-smi ends with {done.returncode}: {said}")
    return check_driver(rows, next((PLUGINS[p] for p in PLUGINS if _version(p)), None))


def check_driver(rows: list[list[str]], cuda: int | None) -> Finding:
    """The driver's rows of `QUERY`, one per GPU, against what CUDA's major version needs."""
    kind, version = rows[0][:2]
    faults = {}
    if cuda and _numbers(version) < OLDEST_DRIVER[cuda]:
        oldest = OLDEST_DRIVER[cuda][0]
        faults[f"the driver is {version}, and CUDA {cuda} needs {oldest} or newer"] = WRONG
    for index, (_, _, total, used, _) in enumerate(rows):
        if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
            faults[f"{int(used) / 1024:.0f} GiB of GPU {index} are in use by others"] = SLOW
    mend = "install a newer driver" if WRONG in faults.values() else "end what else uses the GPUs"
    hottest = max((row[4] for row in rows if row[4].isdecimal()), key=int, default="?")
    says = f"{len(rows)} x {kind}, driver {version}, {hottest} degrees C"
    measured = {"gpus": len(rows), "driver": version, "rows": rows}
    return judged("driver", faults, says, measured, mend)


def loaded() -> Finding:
    """CUDA's libraries as JAX has loaded them, against those that it was built with."""
    from lrkv_jax.kernels.flash.cudnn import OLDEST

    for plugin in PLUGINS:
        try:
            at = importlib.import_module(f"{plugin.replace('-', '_')}._versions")
            break
        except ImportError:
            continue
    else:
        return Finding("CUDA loaded", NOT_HERE, "no CUDA plugin of JAX")
    libraries = ("cuda_runtime", "cudnn", "cublas", "cufft", "cusparse", "cupti")
    found: dict[str, int | str] = {}
    for library in libraries:
        try:
            found[library] = getattr(at, f"{library}_get_version")()
        except Exception as error:  # of several types, by library
            found[library] = " ".join(str(error).split())[:100] or type(error).__name__
    built = {library: getattr(at, f"{library}_build_version")() for library in libraries}
    return check_loaded(found, built, OLDEST)


def check_loaded(found: Mapping[str, int | str], built: Mapping[str, int], oldest: int) -> Finding:
    """Versions as numbers (cuDNN 9.15.0 is 91500), or why a library does not load.

    Patches are interchangeable. cuDNN before `oldest` does not train attention.
    """
    faults = {}
    for library, version in found.items():
        if isinstance(version, str):
            faults[f"{library} does not load ({version})"] = WRONG
        elif version // 100 < built[library] // 100:
            faults[f"{library} is {version}, and JAX was built with {built[library]}"] = WRONG
    cudnn = found.get("cudnn")
    if not faults and isinstance(cudnn, int) and cudnn < oldest:
        faults[f"cudnn is {cudnn}, and attention uses it from {oldest} on"] = SLOW
    says = ", ".join(f"{library} {version}" for library, version in found.items())
    measured: dict[str, Any] = {"loaded": dict(found), "built": dict(built)}
    return judged("CUDA loaded", faults, says, measured)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.match(r"[\d.]*", version)[0].split(".") if n)
