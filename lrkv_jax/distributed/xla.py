"""The options for XLA, in one place: options for a training step, and how much memory to take.

Options are given to the compiler with the program, not through `XLA_FLAGS`: a name that this XLA
does not know is then an error in one line, where `XLA_FLAGS` would end the process, and no other
program of the process changes. docs/clusters.md has what was considered and left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

import jax

from lrkv_jax.errors import LrkvError

# A layer's weights arrive while the layer before it computes.
BETWEEN_GPUS = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
# How `XLA_FLAGS` may name it too.
_OLDER = {"xla_gpu_pipeline_all_gather": "xla_gpu_enable_pipelined_all_gather"}


def options(mesh: jax.sharding.Mesh) -> dict[str, str]:
    """The compiler's options for a program on this mesh; empty but between GPUs.

    `LRKV_XLA_FLAGS=off` leaves all of them out, and `XLA_FLAGS` those that it names.
    """
    chosen = os.environ.get("LRKV_XLA_FLAGS", "on")
    if chosen not in ("on", "off"):
        raise LrkvError(f"LRKV_XLA_FLAGS = {chosen}: use on or off")
    if chosen == "off" or mesh.size == 1 or mesh.devices.flat[0].platform != "gpu":
        return {}
    named = set(re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", "")))
    return {name: value for name, value in BETWEEN_GPUS.items() if not named & {name, _OLDER[name]}}


# What is left is for the collectives' buffers, the libraries' workspaces and CUDA's context.
MEMORY_FRACTION = "0.92"


def take_memory(environment: MutableMapping[str, str]) -> None:
    """Let JAX take that share of a GPU's memory, where it takes 0.75 by itself.

    Read when the backend starts. The older name still works, but not beside the newer one.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
