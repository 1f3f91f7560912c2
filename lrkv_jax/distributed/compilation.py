"""Programs compiled ahead of time with XLA's options, and kept on disk for the next start.

The stored programs are JAX's persistent compilation cache. They are run, so they are in a directory
where only this user may write. JAX's key of a program holds the versions, the
options, and the kind of device; of a CPU its instruction sets too, so a home directory may serve
many hosts. Process 0 writes and all read. That only works where they read the same directory: on
GPUs, processes divide the search for the fastest kernels among them, and one that has found its
program on disk would leave the others waiting for its share.

Options are given to the compiler with the program, not through `XLA_FLAGS`: a name that this XLA
does not know is then an error in one line, where `XLA_FLAGS` would end the process, and no other
program of the process changes. experiments/results/NOTES.md has the options that were left out.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError

# Shorter ones are quicker compiled than found on a network file system.
MIN_COMPILE_SECONDS = 0.5

# What is left is for the collectives' buffers, the libraries' workspaces and CUDA's context.
MEMORY_FRACTION = "0.92"
# malloc.h's M_ARENA_MAX (another thread's arena holds 64 MB at most), M_MMAP_MAX (no array is
# mapped by itself; an older glibc refuses such a threshold) and M_TRIM_THRESHOLD (nothing is given
# back).
KEEP = {-8: 1, -4: 0, -1: -1}
# A layer's weights arrive while the layer before it computes.
BETWEEN_GPUS = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}

_FIX = "set LRKV_COMPILATION_CACHE to a directory of your own, or to off"
_HIT = "/jax/compilation_cache/cache_hits"


def use_cache(processes: Processes) -> Path | None:
    """Keep compiled programs in this user's cache directory; returns it, None if that is off.

    `LRKV_COMPILATION_CACHE` is another directory, or `off`; `JAX_COMPILATION_CACHE_DIR` is left as
    it is. To be called before anything is compiled. It is off, with a line on stderr, where the
    user has no home directory that can be written, where others can write to the directory, and
    where the processes of a run do not see the same one or the first cannot write to it.

    Raises `LrkvError` for a chosen directory that cannot be made.
    """
    chosen = os.environ.get("LRKV_COMPILATION_CACHE")
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if chosen is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    with processes.together():
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        directory = Path(os.path.expanduser(chosen or f"{base}/lrkv_jax/compiled"))
        reason = _made(directory)
        if reason and chosen:
            raise LrkvError(f"{reason}: {_FIX}")
        reason = reason or _unsafe(directory)
        if processes.count > 1 and processes.index == 0:  # which writes there for the others to see
            reason = reason or _unwritable(directory)
    why = ""
    # Another host may have no home where this one has one.
    if reasons := [text for text in processes.exchange(reason) if text]:
        why = f"{reasons[0]}; {_FIX}"
    elif blind := processes.without_access_to(directory):
        why = (
            f"{blind[0]} does not see {directory}; set LRKV_COMPILATION_CACHE to a directory that "
            "all hosts share"
        )
    if why:  # all go on without it
        jax.config.update("jax_enable_compilation_cache", False)
        if processes.index == 0:
            print(f"lrkv: compiled programs are not cached: {why}", file=sys.stderr)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    return directory.absolute()


def _made(directory: Path) -> str:
    """Make the directory, for this user alone; returns why that cannot be, or ""."""
    if directory.parts[0] == "~":  # expanduser has left it where it was
        return "this user has no home directory"
    try:
        # Whoever can write to the directory above could put another in its place.
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{directory} cannot be made ({error.strerror})"
    return ""


def _unsafe(directory: Path) -> str:
    """Why programs of a directory must not be run, or "": volumes may come with such modes."""
    status = directory.stat()
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022:
        return ""
    return f"{directory} can be written by others, and what it holds is run"


def _unwritable(directory: Path) -> str:
    """Why no file can be made in the directory, or "": a full disk, a read-only mount."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return f"{directory} cannot be written ({error.strerror})"
    return ""


@dataclass(frozen=True)
class Compiled:
    """A program ready to run: `call` takes the arguments it was compiled for.

    `seconds` it took, tracing included; `cached` is whether it came from the cache.
    """

    call: Any  # jax.stages.Compiled, or what the cache gave back
    seconds: float
    cached: bool

    def __str__(self) -> str:
        source = "from the cache" if self.cached else "not in the cache"
        return f"compiled in {self.seconds:.1f} s, {source}"


def compile_ahead(function: Any, *arguments: Any, mesh: jax.sharding.Mesh) -> Compiled:
    """Lower and compile a jitted function for abstract arguments on a mesh, with `xla_options`.

    Raises `LrkvError` if this XLA does not know one of them.
    """
    began, thread = time.monotonic(), threading.get_ident()
    hits = 0

    def note(event: str, **_) -> None:
        nonlocal hits
        hits += event == _HIT and threading.get_ident() == thread

    jax.monitoring.register_event_listener(note)
    try:
        with jax.set_mesh(mesh):
            lowered = function.lower(*arguments)
            call = lowered.compile(compiler_options=xla_options(mesh))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            reason = str(error).splitlines()[0]
            raise LrkvError(f"{reason}: set LRKV_XLA_FLAGS=off to leave it out") from error
        raise
    finally:
        jax.monitoring.unregister_event_listener(note)
    return Compiled(call, time.monotonic() - began, hits > 0)


def xla_options(mesh: jax.sharding.Mesh) -> dict[str, str]:
    """The compiler's options for a program on this mesh; empty except between GPUs.

    `LRKV_XLA_FLAGS=off` leaves all of them out, and `XLA_FLAGS` those that it names.
    """
    chosen = os.environ.get("LRKV_XLA_FLAGS", "on")
    if chosen not in ("on", "off"):
        raise LrkvError(f"LRKV_XLA_FLAGS = {chosen}: use on or off")
    if chosen == "off" or mesh.size == 1 or mesh.devices.flat[0].platform != "gpu":
        return {}
    named = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in BETWEEN_GPUS.items() if name not in named}


def take_memory(environment: MutableMapping[str, str]) -> None:
    """Let JAX take `MEMORY_FRACTION` of a GPU's memory, where it takes 0.75 by itself.

    Read when the backend starts. The older name still works, but not together with the newer one.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)


def keep_memory(environment: Mapping[str, str]) -> None:
    """Let a process that computes on a CPU keep what it frees; before JAX's threads start.

    Each call of a program takes its temporary arrays from the system, which fills every page with
    zeros: a step of the quickstart is 1.18 times as fast without that. Where one of glibc's
    variables (`MALLOC_ARENA_MAX` and others) is set, a GPU is at hand, or another C library, all
    stays as it is.
    """
    gpu = environment.get("JAX_PLATFORMS") != "cpu" and Path("/dev/nvidiactl").exists()
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option and not gpu and not any(name.startswith("MALLOC_") for name in environment):
        for option, value in KEEP.items():
            set_option(option, value)


def program_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a device holds while a program runs, by XLA's analysis of it when compiled.

    They are arguments, output and temporaries, less the output that overwrites arguments.
    """
    memory = program.memory_analysis()
    live = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return live + memory.output_size_in_bytes - memory.alias_size_in_bytes
