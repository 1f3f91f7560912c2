"""A training step on a mesh of named devices: its memory, whether it fits, and its time.

The step is compiled by XLA for as many simulated CPU devices, from shapes alone, or estimated. A
CPU's program differs from a GPU's: it writes to memory what a GPU computes again from its operands,
and it has no host memory to offload to.
"""

import math
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import jax

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.distributed.compilation import MEMORY_FRACTION
from lrkv_jax.distributed.hardware import Hardware
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench.train import TrainProgram
from lrkv_jax.lab.plan.estimate import memory_estimate, sizes_of, state_bytes, time_estimate

# Of a device's memory: what `lrkv train` lets JAX take.
USABLE = float(MEMORY_FRACTION)
POLICIES = ("none", "minimal", "full", "offload")
# The scheduler that a CPU runs by default orders a program for parallel threads: the stacks of all
# loops then exist from the start. A GPU's program is ordered for memory.
FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


@dataclass(frozen=True)
class CompiledStep:
    """XLA's figures of one step on one device, in bytes; `seconds` is what compiling it took.

    `total` is arguments, output and temporaries, less the output that overwrites arguments.
    """

    seconds: float
    arguments: int
    temporary: int
    total: int


def training(
    config: RunConfig, device: Hardware, devices: int | None, *, compiled: bool
) -> dict[str, Any]:
    """The run's step on its mesh, ready for JSON. Bytes are one device's.

    The memory is XLA's of the `compiled` step, or else an estimate. The memory of each remat policy
    and the time are estimates always.
    """
    config = resolved(on_devices(config, devices, device))
    count = math.prod(sizes_of(config.mesh).values())
    state = state_bytes(config)
    estimates = {p: memory_estimate(_with_remat(config, p), state) for p in POLICIES}
    step = compiled_step(config, count) if compiled else None
    needs = step.total if step else estimates[config.train.remat].total
    usable = round(USABLE * device.memory)
    source = "by XLA" if step else "by the estimate"
    return {
        "mesh": sizes_of(config.mesh),
        "devices": count,
        "dtype": config.model.dtype,
        "tokens_per_step": config.train.global_batch_size * config.train.seq_len,
        "memory": {
            "usable": usable,
            **asdict(state),
            "remat": config.train.remat,
            "estimates": {policy: asdict(one) for policy, one in estimates.items()},
        },
        "compiled": asdict(step) if step else None,
        "verdict": {
            "needs": needs,
            "has": usable,
            "fits": needs <= usable,
            "sentence": _verdict(config.mesh, count, needs, usable, source),
        },
        "time": time_estimate(config, device, count),
    }


def simulate_devices(config: RunConfig, devices: int | None, device: Hardware) -> None:
    """Let JAX, which must not have started yet, take this CPU for the devices of the run's mesh."""
    count = math.prod(sizes_of(on_devices(config, devices, device).mesh).values())
    simulated = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), FLAGS, simulated)).strip()
    print(
        f"lrkv: compiling the step for {count} simulated devices, 10 to 30 s for eight; "
        "--no-compile estimates instead",
        file=sys.stderr,
    )


def compiled_step(config: RunConfig, devices: int) -> CompiledStep:
    """Lower and compile the run's step from shapes alone; every axis of its mesh has a size.

    Raises `LrkvError` if JAX has started with fewer CPU devices, and for a model or a batch that
    the mesh cannot split.
    """
    here = jax.devices("cpu")
    if len(here) < devices:
        raise LrkvError(
            f"{devices} devices cannot be simulated here, where JAX has started with "
            f"{len(here)}: set XLA_FLAGS=--xla_force_host_platform_device_count={devices} first"
        )
    program = TrainProgram(config, make_mesh(config.mesh, here[:devices]))
    temporary = program.step.call.memory_analysis().temp_size_in_bytes
    return CompiledStep(program.step.seconds, program.state_bytes, temporary, program.peak_bytes)


def resolved(config: RunConfig) -> RunConfig:
    """The run as an accelerator computes it: `auto` is bfloat16 there."""
    model, optimizer = config.model, config.optimizer
    if model.dtype == "auto":
        model = model.model_copy(update={"dtype": "bfloat16"})
    if optimizer.muon.dtype == "auto":
        muon_config = optimizer.muon.model_copy(update={"dtype": "bfloat16"})
        optimizer = optimizer.model_copy(update={"muon": muon_config})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def on_devices(config: RunConfig, devices: int | None, device: Hardware) -> RunConfig:
    """The run with every axis of its mesh given a size; −1 fills `devices`, or a node.

    Raises `LrkvError` if the sizes do not multiply to `devices`.
    """
    sizes = sizes_of(config.mesh)
    named = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free:
        sizes[free[0]] = max(1, (devices or max(named, device.node)) // named)
    mesh = MeshConfig(**sizes)
    if devices is not None and math.prod(sizes.values()) != devices:
        raise LrkvError(
            f"--devices {devices}: {_mesh_text(mesh)} makes {math.prod(sizes.values())} of them; "
            "set one axis to -1 to take what is left"
        )
    return config.model_copy(update={"mesh": mesh})


def _verdict(mesh: MeshConfig, devices: int, needs: int, usable: int, source: str) -> str:
    device = "The device" if devices == 1 else f"Each of the {devices} devices"
    text = f"{device} ({_mesh_text(mesh)}) needs {_gigabytes(needs)} {source} "
    text += f"and has {_gigabytes(usable)}"
    if needs <= usable:
        return f"{text}: it fits."
    change = "a stronger train.remat or more devices on mesh.fsdp"
    return f"{text}, {_gigabytes(needs - usable)} too little: try {change}."


def _with_remat(config: RunConfig, policy: str) -> RunConfig:
    train = config.train.model_copy(update={"remat": policy})
    return config.model_copy(update={"train": train})


def _mesh_text(mesh: MeshConfig) -> str:
    """mesh.fsdp=8 mesh.tensor=2: the axes that split something."""
    split = [f"mesh.{axis}={size}" for axis, size in sizes_of(mesh).items() if size > 1]
    return " ".join(split) or "no mesh"


def _gigabytes(count: int) -> str:
    """61.2 GB; three digits of it."""
    digits = max(0, 2 - math.floor(math.log10(max(count, 1e7) / 1e9)))
    return f"{count / 1e9:.{digits}f} GB"
