"""How long a training step should take: a model of few parts, each with its assumption.

Products at a share of the device's peak, Newton–Schulz too; the optimiser's pass over its state at
a share of the memory's bandwidth; collectives at a share of the link's. Gathers and scatters over
fsdp hide behind products, all other collectives do not. Nothing else is counted: no input, no
checkpoint, no evaluation, no idle device.

L layers  H heads  K value width  T context
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lrkv_jax.accounting.counts import (
    multiplied_parameters,
    training_flops_per_token,
    training_tokens,
)
from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.hardware import Hardware


@dataclass(frozen=True)
class Assumptions:
    """Shares of the datasheet's figures that a step is assumed to reach."""

    products: float = 0.6  # of the peak, what lies between products included
    memory: float = 0.8
    links: float = 0.8
    hidden: float = 0.8  # of the products' time, behind which collectives over fsdp hide

    def sentences(self, device: Hardware) -> list[str]:
        return [
            f"{device.name}: {device.bf16_flops / 1e12:g} TFLOP/s dense bfloat16, "
            f"{device.memory_bandwidth / 1e12:g} TB/s, {device.link_bandwidth / 1e9:g} GB/s to its "
            f"node of {device.node}, {device.network_bandwidth / 1e9:g} GB/s beyond "
            f"({device.source}).",
            f"Products reach {self.products:.0%} of the peak, with the elementwise work between "
            "them; attention computes the causal half.",
            f"The optimiser reads and writes its state at {self.memory:.0%} of the bandwidth.",
            f"Collectives reach {self.links:.0%} of the link; gathers and scatters over fsdp hide "
            f"behind {self.hidden:.0%} of the products' time, no others hide.",
            "Input, validation, checkpoints and samples are not counted.",
        ]


@dataclass(frozen=True)
class Message:
    """Collectives of one kind over the same axes, in one step of one device.

    `part` is `gradient` (the loss and its gradient), `muon` (Newton–Schulz on the mesh) or `update`
    (the rest).
    """

    kind: str
    axes: tuple[str, ...]
    part: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """A step's seconds by part, and what follows for the run."""

    products: float
    newton_schulz: float
    optimizer: float
    hidden_collectives: float  # not in the sum
    exposed_collectives: float
    step: float
    tokens_per_second: float
    mfu: float
    hours: float
    device_hours: float
    steps: int


def step_products(model: ModelConfig, context: int, remat: str) -> float:
    """FLOPs of one token that a step really executes, forward, backward and again.

    Weights: 6 for each that multiplies. Attention computes half of the T² pairs forward, and two
    and a half times that backward, where its weights are made again. `full` repeats every layer's
    forward pass; `minimal` and `offload` the output projection.
    """
    multiplied = multiplied_parameters(model)
    in_layers = multiplied - model.vocabulary * model.width
    pair = model.attention.logit_width(model) + model.head_width
    attended = model.layers * model.heads * context * pair  # 2 FLOPs a pair, half of the pairs
    output = model.layers * model.heads * model.head_width * model.width
    again = {
        "none": 0,
        "minimal": 2 * output,
        "offload": 2 * output,
        "full": 2 * in_layers + attended,
    }
    return 6 * multiplied + 3.5 * attended + again[remat]


def estimate(
    config: RunConfig,
    device: Hardware,
    sizes: Mapping[str, int],
    messages: Iterable[Message],
    *,
    muon_flops: float,
    parameters: int,
    state: int,
    assume: Assumptions = Assumptions(),
) -> Estimate:
    """The run on a mesh of these sizes.

    `muon_flops` are those of the busiest device; `parameters` and `state` its bytes.
    """
    devices = math.prod(sizes.values())
    train = config.train
    tokens = train.batch * train.context
    rate = device.bf16_flops * assume.products
    products = step_products(config.model, train.context, train.remat) * tokens / devices / rate
    newton_schulz = muon_flops / rate
    # Gradients, as large as the parameters, are read twice; parameters and state read and written.
    moved = 2 * parameters + 2 * parameters + 2 * state
    update = moved / (device.memory_bandwidth * assume.memory)
    behind, open_ = 0.0, 0.0
    for message in messages:
        seconds = message.bytes / (bandwidth(device, sizes, message.axes) * assume.links)
        if message.axes == ("fsdp",) and message.kind in ("all-gather", "reduce-scatter"):
            behind += seconds
        else:
            open_ += seconds
    hidden = min(behind, assume.hidden * products)
    exposed = open_ + behind - hidden
    step = products + newton_schulz + update + exposed
    flops = training_flops_per_token(config.model, train.context) * tokens
    hours = training_tokens(config) / (tokens / step) / 3600
    return Estimate(
        products, newton_schulz, update, hidden, exposed, step, tokens / step,
        flops / (step * devices * device.bf16_flops), hours, hours * devices, train.total_steps,
    )  # fmt: skip


def bandwidth(device: Hardware, sizes: Mapping[str, int], axes: Iterable[str]) -> float:
    """Bytes/s of a collective over `axes`: the node's link if the group lies in one node.

    Devices are numbered with the last axis of `sizes` fastest, and fill nodes in that order.
    """
    names = list(sizes)
    widest = min(names.index(axis) for axis in axes if sizes[axis] > 1)
    reach = math.prod(sizes[name] for name in names[widest:])
    return device.link_bandwidth if reach <= device.node else device.network_bandwidth
