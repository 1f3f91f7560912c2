"""The place of this process among the others, from its launcher's environment.

A run of several processes needs three facts before JAX starts: where process 0 listens,
how many processes there are, and which of them this is. Slurm leaves them in the
environment of a step's tasks, and an indexed Kubernetes Job leaves the number. Under any
other launcher `LRKV_COORDINATOR`, `LRKV_PROCESSES` and `LRKV_PROCESS` give them.

The detection of `jax.distributed.initialize` is not used. Under Slurm it leaves each
process one device, whatever the node holds, and reads the job's `SLURM_NTASKS` instead of
the step's count. Under Kubernetes it needs a client library and the right to list pods.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from lrkv_jax.errors import LrkvError


@dataclass(frozen=True)
class ClusterEnv:
    """Process `process` of `processes`; process 0 listens at `coordinator`, a host:port."""

    launcher: str
    process: int
    processes: int
    coordinator: str


def find(environment: Mapping[str, str]) -> ClusterEnv | None:
    """The place of this process, or None if it is alone.

    Raises `LrkvError` for values that are not numbers or of which one is missing.
    """
    count = number(environment, "LRKV_PROCESSES", 1)
    found = _slurm(environment) if count is None else _explicit(environment, count)
    if found is None:
        for name in ("LRKV_PROCESS", "LRKV_COORDINATOR"):
            if name in environment:
                raise LrkvError(f"{name} is set and LRKV_PROCESSES is not: set how many there are")
        if number(environment, "JOB_COMPLETION_INDEX"):
            raise LrkvError(
                f"pod {environment['JOB_COMPLETION_INDEX']} of a Job is one of several: set "
                "LRKV_PROCESSES to their number, as launch/kubernetes.yaml does"
            )
        return None
    if found.processes == 1:
        return None
    if found.process >= found.processes:
        raise LrkvError(
            f"process {found.process} of {found.processes} ({found.launcher}): they count from 0 "
            f"to {found.processes - 1}"
        )
    if not re.fullmatch(r".+:\d+", found.coordinator):
        raise LrkvError(
            f"LRKV_COORDINATOR = {found.coordinator!r}: write the HOST:PORT where process 0 of "
            f"{found.processes} listens, the same in all"
        )
    return found


def left_out(environment: Mapping[str, str]) -> str | None:
    """One line if Slurm holds tasks for this job and the process is none of them."""
    tasks = number(environment, "SLURM_NTASKS") or 1
    if tasks == 1 or "SLURM_STEP_NUM_TASKS" in environment:
        return None
    return f"SLURM_NTASKS = {tasks}, and srun did not start this process: it runs alone"


def _explicit(environment: Mapping[str, str], count: int) -> ClusterEnv:
    names = {"LRKV_PROCESS": "LRKV_PROCESSES", "JOB_COMPLETION_INDEX": "Kubernetes"}
    for name, launcher in names.items():
        process = number(environment, name)
        if process is not None:
            coordinator = environment.get("LRKV_COORDINATOR", "")
            return ClusterEnv(launcher, process, count, coordinator)
    if count == 1:
        return ClusterEnv("LRKV_PROCESSES", 0, 1, "")
    raise LrkvError(
        f"LRKV_PROCESSES = {count} and nothing says which one this is: set LRKV_PROCESS"
    )


def _slurm(environment: Mapping[str, str]) -> ClusterEnv | None:
    # The step's count: SLURM_NTASKS is the job's in a shell that salloc or sbatch opened.
    names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
    if not all(name in environment for name in names):
        return None
    process, processes = (number(environment, name) for name in names[:2])
    step = "/".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # All of a step agree on this port, above those that Linux hands out.
    port = 61440 + zlib.crc32(step.encode()) % 4096
    coordinator = f"{first_host(environment[names[2]])}:{port}"
    coordinator = environment.get("LRKV_COORDINATOR", coordinator)
    return ClusterEnv("Slurm", process, processes, coordinator)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list such as "node[001-004,007],login1"."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def number(environment: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """The whole number in a variable, None if it is not set."""
    text = environment.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise LrkvError(f"{name} = {text!r}: use a whole number from {least}")
    return int(text)
