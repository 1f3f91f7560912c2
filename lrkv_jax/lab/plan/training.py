"""A training step on a mesh of named devices: its memory, whether it fits, and its time.

The step is compiled by XLA for as many simulated CPU devices, from shapes alone, or estimated. A
CPU's program differs from a GPU's: it writes to memory what a GPU computes again from its operands,
and it has no host memory to offload to.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import jax

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.distributed.compilation import MEMORY_FRACTION, program_bytes
from lrkv_jax.distributed.hardware import Hardware
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench.train import compile_step
from lrkv_jax.lab.plan.estimate import (
    StateBytes,
    memory_estimate,
    muon_flops,
    sizes_of,
    state_bytes,
    time_estimate,
)
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.training.init_from import with_teacher

# Of a device's memory: what `lrkv train` lets JAX take.
USABLE = float(MEMORY_FRACTION)
POLICIES = ("none", "minimal", "full", "offload")
# What an alternative to a step that fits must leave of its device-hours.
WORTH = 0.9
MOST_ALTERNATIVES = 5
TRIED = {
    key: attrgetter(key)
    for key in (
        "train.remat", "train.global_batch_size", "train.grad_accum_steps", "mesh.data",
        "mesh.fsdp", "mesh.context",
    )
}  # fmt: skip
# The scheduler that a CPU runs by default orders a program for parallel threads: the stacks of all
# loops then exist from the start. A GPU's program is ordered for memory.
FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def training(
    config: RunConfig,
    device: Hardware,
    devices: int | None,
    *,
    compiled: bool,
    utilization: Sequence[float],
) -> dict[str, Any]:
    """The run's step on its mesh, ready for JSON. Bytes are one device's.

    The memory is XLA's of the `compiled` step, or else an estimate. The memory of each remat policy
    and the time are estimates always; a step that does not fit has no time.
    """
    config = with_teacher(resolved(on_devices(config, devices, device)))
    count = math.prod(sizes_of(config.mesh).values())
    state = state_bytes(config)
    tokens = config.train.global_batch_size * config.train.seq_len
    flops = training_flops_per_token(config.model, config.train.seq_len) * tokens
    estimates = {
        policy: memory_estimate(_changed(config, {"train.remat": policy}), state)
        for policy in POLICIES
    }
    step = compiled_step(config, count) if compiled else None
    needs = step["total"] if step else estimates[config.train.remat].total
    usable = round(USABLE * device.memory)
    fits = needs <= usable
    source = "by XLA" if step else "by the estimate"
    return {
        "mesh": sizes_of(config.mesh),
        "devices": count,
        "dtype": config.model.dtype,
        "tokens_per_step": tokens,
        "newton_schulz_share": muon_flops(config) / flops,
        "memory": {
            "usable": usable,
            **asdict(state),
            "remat": config.train.remat,
            "estimates": {policy: asdict(one) for policy, one in estimates.items()},
        },
        "compiled": step,
        "verdict": {
            "needs": needs,
            "has": usable,
            "fits": fits,
            "sentence": _verdict(config.mesh, count, needs, usable, source),
        },
        "time": time_estimate(config, device, count, utilization) if fits else None,
        "alternatives": alternatives(config, device, needs, utilization),
    }


def alternatives(
    config: RunConfig, device: Hardware, needs: int, utilization: Sequence[float]
) -> list[dict[str, Any]]:
    """Settings that make the step fit, or save a tenth of the device-hours of one that fits.

    `needs` is what the step of `config` takes of each device. Each alternative is estimated, and
    what the estimate of `config` lacks of `needs` is added. The fewest changes come first, and each
    further one must save another tenth.
    """
    usable = USABLE * device.memory
    lacks = needs - memory_estimate(config, state_bytes(config)).total

    def hours(run: RunConfig) -> list[float]:
        devices = math.prod(sizes_of(run.mesh).values())
        return time_estimate(run, device, devices, utilization)["device_hours"]

    most = WORTH * hours(config)[-1] if needs <= usable else math.inf
    found: dict[frozenset[str], dict[str, Any]] = {}
    for changed, state in _tried(config, larger_batch=needs <= usable):
        total, cost = memory_estimate(changed, state).total + lacks, hours(changed)
        changes = {key: of(changed) for key, of in TRIED.items() if of(changed) != of(config)}
        keys = frozenset("mesh" if key.startswith("mesh.") else key for key in changes)
        known = found[keys]["device_hours"] if keys in found else [math.inf]
        if total <= usable and cost < known and cost[-1] <= most:
            found[keys] = {"changes": changes, "needs": total, "device_hours": cost}
    few = {keys: one for keys, one in found.items() if not _needless(keys, found)}
    order = sorted(few, key=lambda keys: (len(keys), few[keys]["device_hours"]))
    return [few[keys] for keys in order[:MOST_ALTERNATIVES]]


def _needless(keys: frozenset[str], found: dict[frozenset[str], dict[str, Any]]) -> bool:
    """Whether fewer of these changes do as well."""
    cost = found[keys]["device_hours"][-1]
    return any(fewer < keys and cost > WORTH * found[fewer]["device_hours"][-1] for fewer in found)


def _tried(config: RunConfig, *, larger_batch: bool) -> Iterator[tuple[RunConfig, StateBytes]]:
    """Runs with other settings, and their state: larger batches, or else other meshes.

    A larger batch saves Newton–Schulz. Offload is left out: nobody has timed its copies.
    """
    train, mesh = config.train, config.mesh
    batches = (1, 2, 4, 8, 16) if larger_batch else (1,)
    meshes = [{"mesh.fsdp": mesh.fsdp}]
    if not larger_batch:
        meshes = [{"mesh.data": 1, "mesh.fsdp": mesh.data * mesh.fsdp}]
        meshes += [{"mesh.fsdp": mesh.fsdp * times} for times in (1, 2, 4, 8)]
        meshes += [{"mesh.context": mesh.context * times} for times in (2, 4, 8)]
    microbatches = sorted(
        {times * parts for times in (1, 2, 4, 8, 16) for parts in (1, train.grad_accum_steps)}
    )
    for sizes in meshes:
        split = _changed(config, sizes | {"train.grad_accum_steps": 1})
        try:
            state = state_bytes(split)
        except LrkvError:  # what this mesh cannot split
            continue
        rows = train.global_batch_size // (split.mesh.data * split.mesh.fsdp)
        for policy, times, parts in itertools.product(POLICIES[:3], batches, microbatches):
            if rows * times % parts == 0:
                values = policy, train.global_batch_size * times, parts
                yield _changed(split, dict(zip(TRIED, values, strict=False))), state


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """The settings with others in the place of these, by dotted key."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        value = _changed(getattr(config, name), {rest: value}) if rest else value
        config = config.model_copy(update={name: value})
    return config


def simulate_devices(config: RunConfig, devices: int | None, device: Hardware) -> int:
    """Let JAX, which must not have started yet, take this CPU for the devices of the run's mesh.

    Returns how many they are.
    """
    count = math.prod(sizes_of(on_devices(config, devices, device).mesh).values())
    simulated = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), FLAGS, simulated)).strip()
    return count


def compiled_step(config: RunConfig, devices: int) -> dict[str, Any]:
    """XLA's bytes of one device for the run's step, and the seconds that compiling it took.

    It is compiled from shapes alone; every axis of the run's mesh has a size. `total` is arguments,
    output and temporaries, less the output that overwrites arguments.

    Raises `LrkvError` if JAX has started with fewer CPU devices, and for a model or a batch that
    the mesh cannot split.
    """
    here = jax.devices("cpu")
    if len(here) < devices:
        raise LrkvError(
            f"{devices} devices cannot be simulated here, where JAX has started with "
            f"{len(here)}: set XLA_FLAGS=--xla_force_host_platform_device_count={devices} first"
        )
    step = compile_step(config, make_mesh(config.mesh, here[:devices]))
    memory = step.call.memory_analysis()
    return {
        "seconds": step.seconds, "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes, "total": program_bytes(step.call),
    }  # fmt: skip


def resolved(config: RunConfig) -> RunConfig:
    """The run as an accelerator computes it: `auto` is bfloat16 there."""
    keys = ("model.dtype", "optimizer.muon.dtype")
    return _changed(config, {key: "bfloat16" for key in keys if attrgetter(key)(config) == "auto"})


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
    return f"{text}, {_gigabytes(needs - usable)} too little."


def _mesh_text(mesh: MeshConfig) -> str:
    """mesh.fsdp=8 mesh.tensor=2: the axes that split something."""
    split = [f"mesh.{axis}={size}" for axis, size in sizes_of(mesh).items() if size > 1]
    return " ".join(split) or "no mesh"


def _gigabytes(count: int) -> str:
    """61.2 GB; three digits of it."""
    digits = max(0, 2 - math.floor(math.log10(max(count, 1e7) / 1e9)))
    return f"{count / 1e9:.{digits}f} GB"
