"""How long a training step should take: a model of few parts, each with its assumption.

Products run at a share of the device's peak, Newton–Schulz too; the optimizer's pass over its state
at a share of the memory's bandwidth; collectives at a share of the link's. Gathers and scatters
hide behind products, all other collectives do not. Input, checkpoints and validation are not
counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.distributed.hardware import Hardware
from lrkv_jax.models.accounting.counts import (
    multiplied_parameters,
    training_flops_per_token,
    training_tokens,
)


@dataclass(frozen=True)
class Assumptions:
    """Shares of the datasheet's figures that a step is assumed to reach."""

    products: float = 0.6  # of the peak, what lies between products included
    memory: float = 0.8
    links: float = 0.8
    hidden: float = 0.8  # of the products' time, behind which gathers and scatters hide


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over groups of one size, in one step of one device.

    `devices` form a group, and their numbers extend over `reach`. `bytes` are what the device sends
    for all of them.
    """

    kind: str
    devices: int
    reach: int
    bytes: int


def bytes_sent(kind: str, operand_bytes: int, devices: int) -> float:
    """Bytes that each of n devices sends for one collective of this operand.

    By the bandwidth-optimal algorithms: an all-gather sends each shard to n − 1 others, a
    reduce-scatter and an all-to-all send (n − 1)/n of the operand, and an all-reduce is a
    reduce-scatter and an all-gather.
    """
    return {
        "all-gather": operand_bytes * (devices - 1),
        "reduce-scatter": operand_bytes * (devices - 1) / devices,
        "all-to-all": operand_bytes * (devices - 1) / devices,
        "all-reduce": 2 * operand_bytes * (devices - 1) / devices,
    }[kind]


@dataclass(frozen=True)
class StepTime:
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


def executed_flops(model: ModelConfig, context: int, remat: str) -> float:
    """FLOPs of one token that a step really executes: forward, backward and recomputed.

    Each weight that multiplies counts 6. Attention computes half of the T² pairs forward, and two
    and a half times that backward, where its weights are made again. `full` repeats every layer's
    forward pass; `minimal` and `offload` the output projection.
    """
    multiplied = multiplied_parameters(model)
    in_layers = multiplied - model.vocabulary * model.width
    pair = model.attention.logit_width(model) + model.head_width
    attended = model.layers * model.heads * context * pair  # 2 FLOPs a pair, half of the pairs
    output = model.layers * model.heads * model.head_width * model.width
    recomputed = {
        "none": 0,
        "minimal": 2 * output,
        "offload": 2 * output,
        "full": 2 * in_layers + attended,
    }
    return 6 * multiplied + 3.5 * attended + recomputed[remat]


def step_time(
    config: RunConfig,
    device: Hardware,
    devices: int,
    sent: Iterable[Collective],
    *,
    muon_flops: float,
    parameters: int,
    state: int,
    assume: Assumptions = Assumptions(),
) -> StepTime:
    """The time of the run's step on so many devices, each of which sends these collectives.

    `muon_flops`, `parameters` and `state` are those of one device, the latter in bytes.
    """
    train = config.train
    tokens = train.global_batch_size * train.seq_len
    rate = device.bf16_flops * assume.products
    products = executed_flops(config.model, train.seq_len, train.remat) * tokens / devices / rate
    newton_schulz = muon_flops / rate
    # Gradients, as large as the parameters, are read twice; parameters and state read and written.
    moved = 2 * parameters + 2 * parameters + 2 * state
    update = moved / (device.memory_bandwidth * assume.memory)
    can_hide, exposed = 0.0, 0.0
    for one in sent:
        seconds = one.bytes / (bandwidth(device, one.reach) * assume.links)
        if one.kind in ("all-gather", "reduce-scatter"):
            can_hide += seconds
        else:
            exposed += seconds
    hidden = min(can_hide, assume.hidden * products)
    exposed += can_hide - hidden
    step = products + newton_schulz + update + exposed
    flops = training_flops_per_token(config.model, train.seq_len) * tokens
    hours = training_tokens(config) / (tokens / step) / 3600
    return StepTime(
        products, newton_schulz, update, hidden, exposed, step, tokens / step,
        flops / (step * devices * device.bf16_flops), hours, hours * devices, train.total_steps,
    )  # fmt: skip


def bandwidth(device: Hardware, reach: int) -> float:
    """Bytes/s of a collective whose devices' numbers extend over `reach`; they fill nodes in order.

    The node's link if the group lies in one node, else the network.
    """
    return device.link_bandwidth if reach <= device.node else device.network_bandwidth
