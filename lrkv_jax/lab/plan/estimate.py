"""A training step in closed form: its memory and its collectives, without a trace or a compiler.

The state is counted exactly, from the shapes and shardings that the step has. The rest is a formula
of few terms; docs/planning.md says how far it is from XLA.

D model width  F feed-forward width  V vocabulary  H heads  G heads of the attended keys
K head width  W width of a head's query and key
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.distributed.mesh import AXES, check_mesh
from lrkv_jax.lab.plan.step_time import Collective, bytes_sent
from lrkv_jax.training.state import abstract_state

# Logits of a chunk, their softmax and their gradient, all in float32.
LOGIT_ARRAYS = 3


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one device: what it has between two steps, and its gradients in float32.

    `blocks` and `head` are parts of the parameters: those of the layers, and of the output.
    """

    parameters: int
    optimizer: int
    gradients: int
    blocks: int
    head: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device in a step. `kept` is what the forward pass leaves for the backward pass.

    `loss` is the work of one chunk of the loss. `total` adds the state and the gradients.
    """

    kept: int
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
    params = state.params
    own = _bytes(params)
    return StateBytes(
        parameters=own + _bytes(state.teacher),
        optimizer=_bytes(state.opt_state),
        gradients=own,
        blocks=_bytes(params["blocks"]),
        head=_bytes(params.get("head", params["embedding"])),
    )


def memory(config: RunConfig, state: StateBytes) -> MemoryEstimate:
    """An estimate of what a device needs for a step of this run, whose state takes `state`.

    The run's dtype is not `auto`. A second copy of the gradients is there while microbatches are
    summed. A teacher's logits are not counted.
    """
    model, train, mesh = config.model, config.train, config.mesh
    tokens = _microbatch_tokens(config)
    values = kept_values(config) * model.layers * tokens
    kept = values * jnp.dtype(model.dtype).itemsize
    chunk = min(train.loss_chunk, tokens)
    columns = model.vocabulary // mesh.tensor
    head_gradient = 4 * model.width * columns
    loss = LOGIT_ARRAYS * 4 * chunk * columns + head_gradient
    gradients = state.gradients * (1 if train.grad_accum_steps == 1 else 2)
    total = state.parameters + state.optimizer + gradients + kept + loss
    return MemoryEstimate(kept, loss, total)


def kept_values(config: RunConfig) -> int:
    """Values of a token and layer that the backward pass reads, under the run's remat policy.

    `full` keeps the layer's input, and so does `offload`, which has the rest in the host's memory.
    `minimal` keeps also queries, keys, values, what was attended, and the feed-forward layer's
    first products. `none` keeps the stream before and after each norm, and queries and keys before
    and after rotation too.
    """
    model, mesh, policy = config.model, config.mesh, config.train.remat
    if policy in ("full", "offload"):
        return model.width
    attention = model.attention
    queries = model.heads // mesh.tensor
    keys = max(1, attention.key_heads(model) // mesh.tensor)
    width = attention.logit_width(model)
    hidden = model.feed_forward_width // mesh.tensor
    attended = (queries + keys) * (width + model.head_width)
    products = hidden * (2 if model.gated else 1)
    if policy == "minimal":
        return model.width + attended + products
    unrotated = (queries + keys) * width
    return 4 * model.width + attended + unrotated + 2 * products


def collectives(config: RunConfig, state: StateBytes) -> list[Collective]:
    """An estimate of what a device sends in a step, the largest part of it by mesh axis.

    The run's dtype is not `auto`, and `state` is what its state takes. Each microbatch gathers the
    layers' weights twice and the head's once in the model's dtype, and scatters their gradients in
    float32. Devices with the same shard then sum their gradients. Tensor shards sum the stream
    after attention and MLP, forward and backward; shards of the context exchange heads for
    positions of queries, keys, values and outputs, forward and backward.
    """
    model, mesh, times = config.model, config.mesh, config.train.grad_accum_steps
    itemsize, turns = jnp.dtype(model.dtype).itemsize, times * model.layers
    tokens = _microbatch_tokens(config)
    heads = (model.heads + model.attention.key_heads(model)) // mesh.tensor
    width = model.attention.logit_width(model) + model.head_width
    over_context = mesh.context * mesh.tensor
    over_fsdp, copies = mesh.fsdp * over_context, mesh.data * mesh.context
    gathered = (2 * state.blocks + state.head) // 4 * itemsize
    scattered = (state.blocks + state.head) * mesh.fsdp
    found = [
        ("all-gather", mesh.fsdp, over_fsdp, times * gathered),
        ("reduce-scatter", mesh.fsdp, over_fsdp, times * scattered),
        ("all-reduce", copies, mesh.data * over_fsdp, state.gradients),
        ("all-reduce", mesh.tensor, mesh.tensor, 4 * turns * tokens * model.width * itemsize),
        ("all-to-all", mesh.context, over_context, 2 * turns * tokens * heads * width * itemsize),
    ]
    return [
        Collective(kind, devices, reach, round(bytes_sent(kind, operand, devices)))
        for kind, devices, reach, operand in found
        if devices > 1
    ]


def _microbatch_tokens(config: RunConfig) -> int:
    """Tokens of a microbatch on one device."""
    train, mesh = config.train, config.mesh
    tokens = train.global_batch_size * train.seq_len // (mesh.data * mesh.fsdp * mesh.context)
    return tokens // train.grad_accum_steps


def sizes_of(mesh: MeshConfig) -> dict[str, int]:
    """The mesh's sizes by axis."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def _bytes(tree: Any) -> int:
    """Bytes of a device's shards of abstract arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
