"""A training step on a mesh of named devices: memory, collectives, time, and Muon's share."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from lrkv_jax.accounting.counts import training_flops_per_token
from lrkv_jax.accounting.muon import muon_flops, muon_flops_per_device
from lrkv_jax.accounting.timing import Assumptions, Estimate, Message, estimate
from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.foresight.fit import USABLE, shown, verdict
from lrkv_jax.foresight.messages import bytes_sent
from lrkv_jax.foresight.step import (
    Memory,
    matrices,
    memory,
    messages,
    resolved,
    sizes_of,
    state_bytes,
)
from lrkv_jax.hardware import Hardware

POLICIES = ("none", "minimal", "full", "offload")
# The step sizes at which Muon's share is reported: the paper's, and one of a large run.
MUON_TOKENS = (32_768, 524_288)


def training(config: RunConfig, device: Hardware, devices: int | None) -> dict[str, Any]:
    """The run's step on its mesh, ready for JSON. Bytes and FLOPs are one device's unless named."""
    config = resolved(on_devices(config, devices, device))
    sizes = sizes_of(config.mesh)
    usable = round(USABLE * device.memory)
    sent = [*messages(config), *placed_by_the_compiler(config)]
    held = memory(config)
    found = verdict(config, usable)
    return {
        "mesh": sizes,
        "devices": math.prod(sizes.values()),
        "dtype": config.model.dtype,
        "tokens_per_step": config.train.batch * config.train.context,
        "memory": {
            "usable": usable,
            "parameters": held.parameters,
            "optimizer": held.optimizer,
            "gradients": held.gradients,
            "remat": config.train.remat,
            "policies": {policy: _policy(config, policy) for policy in POLICIES},
            "largest": [{"array": label, "bytes": size} for label, size in held.largest],
        },
        "verdict": asdict(found) | {"fits": found.fits, "sentence": found.sentence(config.mesh)},
        "collectives": [asdict(message) for message in sent],
        "muon": muon(config, sent),
        "time": asdict(step_time(config, device, sent)),
        "assumptions": Assumptions().sentences(device),
    }


def step_time(config: RunConfig, device: Hardware, sent: Sequence[Message]) -> Estimate:
    """The time of one step that sends these; every axis of the run's mesh has a size."""
    held = state_bytes(config)
    return estimate(
        config, device, sizes_of(config.mesh), sent,
        muon_flops=muon(config, sent)["flops_busiest_device"],
        parameters=held["parameters"], state=held["optimizer"],
    )  # fmt: skip


def muon(config: RunConfig, sent: Iterable[Message]) -> dict[str, Any]:
    """What Newton–Schulz takes of a step that sends these messages, ready for JSON."""
    sizes, iterations = sizes_of(config.mesh), config.optimizer.muon.iterations
    groups, devices = matrices(config.model, sizes), math.prod(sizes.values())
    per_token = training_flops_per_token(config.model, config.train.context)
    whole = muon_flops(groups, iterations)
    return {
        "flops": whole,
        "flops_busiest_device": muon_flops_per_device(groups, iterations, devices),
        "share": {tokens: whole / (per_token * tokens) for tokens in MUON_TOKENS},
        "bytes_sent": sum(m.bytes for m in sent if m.part == "muon"),
    }


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
            f"--devices {devices}: {shown(mesh)} makes {math.prod(sizes.values())} of them; "
            "set one axis to -1 to take what is left"
        )
    return config.model_copy(update={"mesh": mesh})


def placed_by_the_compiler(config: RunConfig) -> list[Message]:
    """What tensor parallelism adds that the program does not name: sums of the stream [b, T, D].

    A layer sums the attention's and the MLP's output, and in its backward pass the gradient of the
    MLP's input; layers that are computed again sum the attention's output once more. The
    embedding's lookup is one sum, in float32 as the table is.
    """
    tensor, train, model = config.mesh.tensor, config.train, config.model
    if tensor == 1:
        return []
    shares = config.mesh.data * config.mesh.fsdp * config.mesh.context
    values = train.batch * train.context // shares // train.accumulation * model.width
    itemsize = 2 if model.dtype == "bfloat16" else 4
    in_layers = model.layers * (3 if train.remat == "none" else 4)
    each = in_layers * bytes_sent("all-reduce", values * itemsize, tensor)
    each += bytes_sent("all-reduce", values * 4, tensor)
    times = train.accumulation
    return [
        Message("all-reduce", ("tensor",), "gradient", times * (in_layers + 1), round(times * each))
    ]


def _policy(config: RunConfig, policy: str) -> dict[str, int]:
    """Memory under a remat policy; `transient` is what the peak holds beside all that is named."""
    train = config.train.model_copy(update={"remat": policy})
    held: Memory = memory(config.model_copy(update={"train": train}))
    return {"kept": held.kept, "transient": held.transient, "peak": held.peak}
