"""Devices and processes: the mesh, partition rules, start-up, signals, the compilation cache.

Every command that computes calls `start` first.
"""

from __future__ import annotations

import os
import sys

from lrkv_jax.distributed import cluster_env
from lrkv_jax.distributed.processes import HERE, Processes
from lrkv_jax.errors import LrkvError


def start(*, command: str | None = None) -> Processes:
    """Join the run's other processes and set up this one; must come before any use of a device.

    `command` is the name of one that one process does by itself. Raises `LrkvError` if its
    launcher started several, and as `Processes.join`, `Processes.check_devices` and
    `compilation.use_cache` do.
    """
    place = cluster_env.find(os.environ)
    if command is not None and place is not None and place.processes > 1:
        raise LrkvError(
            f"{command} runs in one process, and {place.launcher} started {place.processes}: start "
            "one (srun -n 1)"
        )
    if place is None and (note := cluster_env.left_out(os.environ)) and command is None:
        print(f"lrkv: {note}", file=sys.stderr)
    # These load JAX.
    from lrkv_jax.distributed import compilation

    compilation.take_memory(os.environ)
    compilation.keep_memory(os.environ)
    HERE.join()
    HERE.check_devices()
    compilation.use_cache(HERE)
    return HERE
