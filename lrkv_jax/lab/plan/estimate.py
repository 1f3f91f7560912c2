"""A training step in closed form: its memory and its time, without a trace or a compiler.

The state is counted exactly, from the shapes and shardings that the step has. The rest is a formula
of few terms; docs/planning.md has its error against XLA's count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from lrkv_jax.config import MeshConfig, ModelConfig, RunConfig
from lrkv_jax.distributed.hardware import Hardware
from lrkv_jax.distributed.mesh import AXES, check_mesh
from lrkv_jax.models.accounting.counts import (
    over_layers,
    training_flops_per_token,
    training_tokens,
)
from lrkv_jax.models.transformer import abstract_parameters
from lrkv_jax.training.state import abstract_state, learning_specs

# Logits of a chunk, their softmax and their gradient, all in float32.
LOGIT_ARRAYS = 3


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one device: what it has between two steps, and its gradients in float32."""

    parameters: int
    optimizer: int
    gradients: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device in a step.

    `activations` is what the forward pass leaves for the backward pass, `loss` the work of one
    chunk of the loss. `total` adds the state and the gradients.
    """

    activations: int
    loss: int
    total: int


def state_bytes(config: RunConfig) -> StateBytes:
    """The bytes that a device holds; every axis of the run's mesh has a size.

    Raises `LrkvError` for a model or a batch that the mesh cannot split.
    """
    sizes = sizes_of(config.mesh)
    axis_types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)
    check_mesh(config, mesh)
    state = abstract_state(config, mesh)
    trained = _bytes(state.params)
    return StateBytes(trained + _bytes(state.teacher), _bytes(state.opt_state), trained)


def memory_estimate(config: RunConfig, state: StateBytes) -> MemoryEstimate:
    """The memory of a device for a step of this run, whose state takes `state`.

    The run's dtype is not `auto`. A second copy of the gradients is there while microbatches are
    summed. A teacher's logits are not counted.
    """
    model, train, mesh = config.model, config.train, config.mesh
    tokens = train.global_batch_size * train.seq_len
    tokens //= mesh.data * mesh.fsdp * mesh.context * train.grad_accum_steps
    values = over_layers(model, partial(activation_values, config)) * tokens
    activations = values * jnp.dtype(model.dtype).itemsize
    columns = model.vocabulary // mesh.tensor
    head_gradient = 4 * model.width * columns
    loss = LOGIT_ARRAYS * 4 * min(train.loss_chunk, tokens) * columns + head_gradient
    gradients = state.gradients * (1 if train.grad_accum_steps == 1 else 2)
    total = state.parameters + state.optimizer + gradients + activations + loss
    return MemoryEstimate(activations, loss, total)


def activation_values(config: RunConfig, model: ModelConfig) -> int:
    """Values of a token and layer that the backward pass reads, under the run's remat policy.

    `model` is the one of the layer's kind.

    `full` keeps the layer's input, and so does `offload`, which has the rest in the host's memory.
    `minimal` keeps also queries, keys, values, what was attended, and the feed-forward layer's
    first products. `none` keeps the stream before and after each norm, and queries and keys before
    and after rotation too.
    """
    mesh, policy = config.mesh, config.train.remat
    if policy in ("full", "offload"):
        return model.width
    attention = model.attention
    heads = model.heads // mesh.tensor
    heads += max(1, attention.key_heads(model) // mesh.tensor)
    width = attention.logit_width(model)
    products = model.feed_forward_width // mesh.tensor * (2 if model.gated else 1)
    attended = heads * (width + model.head_width)
    if policy == "minimal":
        return model.width + attended + products
    return 4 * model.width + attended + heads * width + 2 * products


def time_estimate(
    config: RunConfig, device: Hardware, devices: int, utilization: Sequence[float]
) -> dict[str, list[float]]:
    """A step's seconds and what follows for the run, each from least to most.

    That is where its executed FLOPs reach between the shares `utilization` of the devices' peak.
    Newton–Schulz runs at the same rate, as does a teacher's forward pass, and `full`
    rematerialization repeats the model's. Input, validation and checkpoints are not counted.
    """
    train = config.train
    tokens = train.global_batch_size * train.seq_len
    flops = training_flops_per_token(config.model, train.seq_len) * tokens
    executed = flops * (4 / 3 if train.remat == "full" else 1) + muon_flops(config)
    if train.teacher_model is not None:
        executed += training_flops_per_token(train.teacher_model, train.seq_len) / 3 * tokens
    shares = sorted(utilization)
    step = [executed / (devices * device.bf16_flops * share) for share in reversed(shares)]
    hours = [training_tokens(config) / tokens * seconds / 3600 for seconds in step]
    return {
        "utilization": shares,
        "step": step,
        "tokens_per_second": [tokens / seconds for seconds in reversed(step)],
        "hours": hours,
        "device_hours": [devices * each for each in hours],
    }


def muon_flops(config: RunConfig) -> int:
    """FLOPs of Newton–Schulz for all matrices that learn, each orthogonalized once."""
    leaves = jax.tree.leaves(abstract_parameters(config.model))
    iterations, total = config.optimizer.muon.iterations, 0
    for spec, leaf in zip(jax.tree.leaves(learning_specs(config)), leaves, strict=True):
        if spec.group == "matrix":
            count = math.prod(leaf.shape[: spec.batch])  # layers, heads
            rows, columns = spec.fans(leaf.shape)
            total += count * newton_schulz_flops(rows, columns, iterations)
    return total


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> int:
    """FLOPs of one matrix of M × N, M ≤ N: X Xᵀ and (…) X, 2 M² N each, and their square, 2 M³."""
    small, large = sorted((rows, columns))
    return iterations * (4 * small**2 * large + 2 * small**3)


def sizes_of(mesh: MeshConfig) -> dict[str, int]:
    """The mesh's sizes by axis."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def _bytes(tree: Any) -> int:
    """Bytes of a device's shards of abstract arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
