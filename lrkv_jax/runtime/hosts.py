"""Which process of how many this one is, as its launcher's environment says.

A run of several processes needs three facts before JAX starts: where process 0 listens, how many
processes there are, and which of them this is. Slurm, Open MPI, the PMI launchers (MPICH, Intel
MPI) and an indexed Kubernetes Job leave them in the environment; `LRKV_COORDINATOR`,
`LRKV_PROCESSES` and `LRKV_PROCESS` say them plainly and override.

`jax.distributed.initialize` detects some of this by itself. Its detection is not used: under Slurm
and Open MPI it leaves each process one device, whatever the node holds; it reads the job's
`SLURM_NTASKS` where the step's count is meant, and so waits for others in an interactive shell;
Open MPI 5 needs mpi4py there, and Kubernetes a client library and the right to list pods.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lrkv_jax.errors import LrkvError


@dataclass(frozen=True)
class Place:
    """One process's place in a run.

    `local_process` of `local_processes` is its place among those of its host. `coordinator` is
    host:port of process 0, or None where the launcher does not say it.
    """

    launcher: str
    process: int
    processes: int
    coordinator: str | None
    local_process: int = 0
    local_processes: int = 1


def find(environment: Mapping[str, str]) -> Place | None:
    """This process's place, or None if it is alone.

    A count of 1 is alone, unless `LRKV_COORDINATOR` and `LRKV_PROCESSES` ask for a run of one.
    Raises `LrkvError` for values that are not numbers, contradict each other, or lack one.
    """
    launched = _launched(environment)
    processes = _number(environment, "LRKV_PROCESSES")
    process = _number(environment, "LRKV_PROCESS")
    coordinator = environment.get("LRKV_COORDINATOR")
    if launched is None and processes is None:
        if process is not None or coordinator is not None:
            name = "LRKV_PROCESS" if process is not None else "LRKV_COORDINATOR"
            raise LrkvError(f"{name} is set and LRKV_PROCESSES is not: set how many there are")
        return None
    if launched is None:
        if process is None and processes > 1:
            raise LrkvError(
                f"LRKV_PROCESSES = {processes} and nothing says which one this is: set LRKV_PROCESS"
            )
        launched = Place("LRKV_PROCESSES", process or 0, processes, coordinator)
    elif processes is not None and process is None and launched.processes not in (processes, 0):
        raise LrkvError(
            f"LRKV_PROCESSES = {processes} and {launched.launcher} started {launched.processes}: "
            "unset it, or set LRKV_PROCESS too"
        )
    place = replace(
        launched,
        process=launched.process if process is None else process,
        processes=launched.processes if processes is None else processes,
        coordinator=coordinator or launched.coordinator,
    )
    if place.processes == 1 and None in (processes, coordinator):
        return None
    return _checked(place)


def _checked(place: Place) -> Place:
    where = f"({place.launcher})"
    if place.processes == 0:
        raise LrkvError(
            f"process {place.process} {where} is one of several: set LRKV_PROCESSES to their "
            "number, as launch/kubernetes.yaml does"
        )
    if place.process >= place.processes:
        raise LrkvError(
            f"process {place.process} of {place.processes} {where}: they count from 0 to "
            f"{place.processes - 1}"
        )
    if place.coordinator is None:
        raise LrkvError(
            f"nothing says where process 0 of {place.processes} {where} listens: set "
            "LRKV_COORDINATOR=HOST:PORT, the same in all"
        )
    if not re.fullmatch(r".+:\d+", place.coordinator):
        raise LrkvError(f"LRKV_COORDINATOR = {place.coordinator}: write HOST:PORT")
    return place


def share_of_devices(place: Place, environment: Mapping[str, str]) -> list[int] | None:
    """Which of the host's GPUs are this process's, by number; None is all that it sees.

    One process a host drives them all. Several share those that they see in common; where the
    launcher has given each its own (one visible, or bound by Slurm), there is nothing to share.
    """
    bound = "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "JAX_LOCAL_DEVICE_IDS"
    visible = _visible_gpus(environment)
    processes = place.local_processes
    if processes == 1 or visible <= 1 or any(name in environment for name in bound):
        return None
    if visible % processes:
        raise LrkvError(
            f"{processes} processes on a host of {visible} GPUs cannot share them: start one, or "
            "a number that divides them"
        )
    share = visible // processes
    return list(range(place.local_process * share, (place.local_process + 1) * share))


def _visible_gpus(environment: Mapping[str, str]) -> int:
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([part for part in named.split(",") if part.strip()])
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))


def left_out(environment: Mapping[str, str]) -> str | None:
    """One line if Slurm holds tasks for this job and the process is none of them."""
    tasks = _number(environment, "SLURM_NTASKS") or 1
    if tasks == 1 or "SLURM_STEP_NUM_TASKS" in environment:
        return None
    return f"SLURM_NTASKS = {tasks}, and srun did not start this process: it runs alone"


# Launchers. MPI's variables come first: under Slurm, mpirun starts its daemons with srun, and
# their variables say nothing about the ranks below them.


def _launched(environment: Mapping[str, str]) -> Place | None:
    places = (read(environment) for read in (_open_mpi, _pmi, _slurm, _kubernetes))
    return next((place for place in places if place is not None), None)


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    return _mpi(
        environment, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    )  # fmt: skip


def _pmi(environment: Mapping[str, str]) -> Place | None:
    place = _mpi(environment, "PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    step = _slurm(environment)
    if place is None or step is None or step.processes != place.processes:
        return place
    # srun itself speaks PMI: it knows its step's first host.
    return replace(step, process=place.process)


def _mpi(environment, launcher, rank, size, local_rank, local_size) -> Place | None:
    process, processes = _number(environment, rank), _number(environment, size)
    if process is None or processes is None:
        return None
    local_process = _number(environment, local_rank) or 0
    local_processes = _number(environment, local_size) or 1
    host = "127.0.0.1" if local_processes == processes else _mpi_host(environment)
    coordinator = host and f"{host}:{_port(environment, _MPI_JOB)}"
    return Place(launcher, process, processes, coordinator, local_process, local_processes)


def _mpi_host(environment: Mapping[str, str]) -> str | None:
    """Rank 0's host as far as can be known: the allocation's first, or where mpirun was called."""
    if "SLURM_JOB_NODELIST" in environment:
        return first_host(environment["SLURM_JOB_NODELIST"])
    # Open MPI 4: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911".
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri):
        return found[1] or f"[{found[2]}]"
    # Open MPI 5: "prterun-node001-12345@1".
    namespace = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", ""))
    return namespace[1] if namespace else None


def _slurm(environment: Mapping[str, str]) -> Place | None:
    # The step's own count: SLURM_NTASKS is the job's in a shell that salloc or sbatch opened.
    names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
    if not all(name in environment for name in names):
        return None
    process, processes = (_number(environment, name) for name in names[:2])
    coordinator = f"{first_host(environment[names[2]])}:{_port(environment, _SLURM_JOB)}"
    return Place("Slurm", process, processes, coordinator, *_slurm_local(environment))


def _slurm_local(environment: Mapping[str, str]) -> tuple[int, int]:
    """(place, count) among the step's tasks on this host, from counts like "2(x3),1"."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number(environment, "SLURM_NODEID") or 0
    count = counts[node] if node < len(counts) else 1
    return _number(environment, "SLURM_LOCALID") or 0, count


def first_host(nodes: str) -> str:
    """The first host of a Slurm list such as "node[001-004,007],login1"."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _kubernetes(environment: Mapping[str, str]) -> Place | None:
    process = _number(environment, "JOB_COMPLETION_INDEX")
    if process is None or (process == 0 and "LRKV_PROCESSES" not in environment):
        return None
    # A Job does not tell its pods how many they are; 0 stands for that.
    return Place("Kubernetes", process, 0, None)


# Names of a job that all of its processes share. A step's are no use to MPI: the ranks beside
# mpirun are not in the step that its daemons are in.
_SLURM_JOB = "SLURM_JOB_ID", "SLURM_STEP_ID"
_MPI_JOB = "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"


def _port(environment: Mapping[str, str], names: Sequence[str]) -> int:
    """A port that all processes of a job agree on, above those that Linux hands out."""
    job = "/".join(environment.get(name, "") for name in names)
    return 61440 + zlib.crc32(job.encode()) % 4096


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise LrkvError(f"{name} = {text!r}: use a whole number from 0")
    return int(text)
