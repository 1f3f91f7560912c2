"""A training step on a mesh of named devices: memory, collectives, time, and Muon's share."""

import functools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import jax

from lrkv_jax.config import MeshConfig, ModelConfig, RunConfig
from lrkv_jax.distributed.compilation import MEMORY_FRACTION
from lrkv_jax.distributed.hardware import Hardware
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.plan.compiled import CompiledStep, compiled_step, simulate
from lrkv_jax.lab.plan.estimate import StateBytes, collectives, memory, sizes_of, state_bytes
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.models.accounting.muon import Matrices, muon_flops, muon_flops_per_device
from lrkv_jax.models.accounting.timing import Assumptions, Collective, Estimate, estimate
from lrkv_jax.models.transformer import abstract_parameters, specs
from lrkv_jax.optim.sharded_newton_schulz import layout_of

# Of a device's memory: what `lrkv train` lets JAX take.
USABLE = float(MEMORY_FRACTION)
POLICIES = ("none", "minimal", "full", "offload")
# The step sizes at which Muon's share is reported: the paper's, and one of a large run.
MUON_TOKENS = (32_768, 524_288)


def training(
    config: RunConfig, device: Hardware, devices: int | None, *, compiled: bool
) -> dict[str, Any]:
    """The run's step on its mesh, ready for JSON. Bytes and FLOPs are one device's unless named.

    Memory and collectives are XLA's of the `compiled` step, or else estimates. The memory of each
    remat policy is an estimate always.
    """
    config = resolved(on_devices(config, devices, device))
    count = math.prod(sizes_of(config.mesh).values())
    state = state_bytes(config)
    step = compiled_step(config, count) if compiled else None
    sent = step.collectives if step else collectives(config, state)
    usable = round(USABLE * device.memory)
    return {
        "mesh": sizes_of(config.mesh),
        "devices": count,
        "dtype": config.model.dtype,
        "tokens_per_step": config.train.batch * config.train.context,
        "memory": {
            "usable": usable,
            "parameters": state.parameters,
            "optimizer": state.optimizer,
            "gradients": state.gradients,
            "remat": config.train.remat,
            "estimates": {p: asdict(memory(_under(config, p), state)) for p in POLICIES},
        },
        "compiled": asdict(step) if step else None,
        "verdict": _verdict(config, state, step, usable),
        "collectives": [asdict(one) for one in sent],
        "muon": muon(config),
        "time": asdict(step_time(config, device, sent, state)),
        "assumptions": Assumptions().sentences(device),
    }


def simulate_devices(config: RunConfig, devices: int | None, device: Hardware) -> None:
    """Prepare JAX, which must not have started yet, to compile the run's step, and say so."""
    count = math.prod(sizes_of(on_devices(config, devices, device).mesh).values())
    simulate(count)
    print(
        f"lrkv: compiling the step for {count} simulated devices, 10 to 30 s for eight; "
        "--no-compile estimates instead",
        file=sys.stderr,
    )


def resolved(config: RunConfig) -> RunConfig:
    """The run as an accelerator computes it: `auto` is bfloat16 there."""
    model, optimizer = config.model, config.optimizer
    if model.dtype == "auto":
        model = model.model_copy(update={"dtype": "bfloat16"})
    if optimizer.muon.dtype == "auto":
        muon = optimizer.muon.model_copy(update={"dtype": "bfloat16"})
        optimizer = optimizer.model_copy(update={"muon": muon})
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
            f"--devices {devices}: {_shown(mesh)} makes {math.prod(sizes.values())} of them; "
            "set one axis to -1 to take what is left"
        )
    return config.model_copy(update={"mesh": mesh})


def step_time(
    config: RunConfig, device: Hardware, sent: Iterable[Collective], state: StateBytes
) -> Estimate:
    """The time of one step that sends these; every axis of the run's mesh has a size."""
    return estimate(
        config, device, math.prod(sizes_of(config.mesh).values()), sent,
        muon_flops=muon(config)["flops_busiest_device"],
        parameters=state.parameters, state=state.optimizer,
    )  # fmt: skip


def muon(config: RunConfig) -> dict[str, Any]:
    """What Newton–Schulz takes of the run's step, ready for JSON."""
    sizes, iterations = sizes_of(config.mesh), config.optimizer.muon.iterations
    groups, devices = matrices(config.model, sizes), math.prod(sizes.values())
    per_token = training_flops_per_token(config.model, config.train.context)
    whole = muon_flops(groups, iterations)
    return {
        "flops": whole,
        "flops_busiest_device": muon_flops_per_device(groups, iterations, devices),
        "share": {tokens: whole / (per_token * tokens) for tokens in MUON_TOKENS},
    }


def matrices(model: ModelConfig, sizes: dict[str, int]) -> list[Matrices]:
    """What Muon orthogonalizes, in the groups of `optim.sharded_newton_schulz`."""
    mesh = SimpleNamespace(shape=sizes)
    groups: dict[Any, int] = {}
    for spec, leaf in _weights(model):
        if spec.group == "matrix" and math.prod(leaf.shape):
            layout = layout_of(spec, leaf.shape, mesh)
            count = math.prod(leaf.shape[: spec.batch])
            groups[layout[1:]] = groups.get(layout[1:], 0) + count
    return [
        Matrices(rows, columns, count, math.prod(sizes[axis] for axis in batch_axes))
        for (rows, columns, batch_axes, *_), count in groups.items()
    ]


@functools.lru_cache(maxsize=8)
def _weights(model: ModelConfig) -> list[tuple[Any, Any]]:
    leaves = jax.tree.leaves(abstract_parameters(model))
    return list(zip(jax.tree.leaves(specs(model)), leaves, strict=True))


def _verdict(
    config: RunConfig, state: StateBytes, step: CompiledStep | None, has: int
) -> dict[str, Any]:
    """Whether a step fits in `has` bytes, and if not, what would by the estimate."""
    needs = step.total if step else memory(config, state).total
    count = math.prod(sizes_of(config.mesh).values())
    device = "the device" if count == 1 else f"each of the {count} devices"
    whose = "by XLA" if step else "by the estimate"
    sentence = f"{device} ({_shown(config.mesh)}) needs {_gigabytes(needs)} {whose} "
    sentence += f"and has {_gigabytes(has)}"
    if needs <= has:
        sentence += ": it fits"
    else:
        sentence += f", {_gigabytes(needs - has)} too little: "
        sentence += next(
            _suggestions(config, has), "no change of remat or mesh that was tried fits"
        )
    return {"needs": needs, "has": has, "fits": needs <= has, "sentence": sentence}


def _suggestions(config: RunConfig, has: int) -> Iterator[str]:
    """Changes with which a step fits in `has` bytes by the estimate, the smallest first."""
    policy = config.train.remat
    stronger = {"none": ("minimal", "full"), "minimal": ("full",)}.get(policy, ())
    tried = [(f"train.remat={policy}", _under(config, policy)) for policy in stronger]
    rows = config.train.batch // config.train.accumulation // config.mesh.data
    for more in (2, 4, 8, 16):
        mesh = config.mesh.model_copy(update={"fsdp": config.mesh.fsdp * more})
        wider = config.model_copy(update={"mesh": mesh})
        change = f"train.remat=full and mesh.fsdp={mesh.fsdp} on {more} times as many devices"
        if rows % mesh.fsdp == 0 and config.model.width % mesh.fsdp == 0:
            tried.append((change, _under(wider, "full")))
    for change, changed in tried:
        needs = memory(changed, state_bytes(changed)).total
        if needs <= has:
            yield f"{change} would fit, with about {_gigabytes(needs)}"


def _under(config: RunConfig, policy: str) -> RunConfig:
    train = config.train.model_copy(update={"remat": policy})
    return config.model_copy(update={"train": train})


def _shown(mesh: MeshConfig) -> str:
    """mesh.fsdp=8 mesh.tensor=2: the axes that split something."""
    split = [f"mesh.{axis}={size}" for axis, size in sizes_of(mesh).items() if size > 1]
    return " ".join(split) or "no mesh"


def _gigabytes(count: int) -> str:
    """61.2 GB; three digits of it."""
    digits = max(0, 2 - math.floor(math.log10(max(count, 1e7) / 1e9)))
    return f"{count / 1e9:.{digits}f} GB"
