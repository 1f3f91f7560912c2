"""What a training step will hold and send on each device of a mesh, before any device is there.

The step itself is traced for an abstract mesh: nothing is allocated, compiled or counted by hand.
Its jaxpr is walked for the memory (`liveness`) and for the collectives (`messages`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from lrkv_jax.accounting.muon import Matrices
from lrkv_jax.accounting.timing import Message
from lrkv_jax.config import MeshConfig, ModelConfig, RunConfig
from lrkv_jax.config.schema import OptimizerConfig, TrainConfig
from lrkv_jax.foresight.liveness import GPU, Rules, peak
from lrkv_jax.foresight.messages import messages_of
from lrkv_jax.foresight.program import Array, Program
from lrkv_jax.model import abstract_parameters, specs
from lrkv_jax.nn.weight import WeightSpec
from lrkv_jax.optim.spread import layout_of
from lrkv_jax.sharding import AXES, batch_sharding, check_mesh, partition
from lrkv_jax.train.rows import RowFormat
from lrkv_jax.train.state import TrainState, abstract_state
from lrkv_jax.train.step import TrainStep, make_train_step


@dataclass(frozen=True)
class Memory:
    """Bytes of one device in a training step.

    `parameters` and `optimizer` are alive throughout; `gradients` is one float32 copy of a device's
    share; `kept` is what the forward pass leaves for the backward pass. `peak` is the most that is
    alive at one time, `at_peak` what that is, `largest` the arrays that make most of it.
    """

    parameters: int
    optimizer: int
    gradients: int
    kept: int
    peak: int
    at_peak: dict[str, int]
    largest: tuple[tuple[str, int], ...]

    @property
    def transient(self) -> int:
        """What the peak holds beside parameters, optimiser state, gradients and what is kept."""
        named = ("parameters", "optimizer", "kept", "gradients")
        return self.peak - sum(self.at_peak.get(kind, 0) for kind in named)


def resolved(config: RunConfig) -> RunConfig:
    """The run as an accelerator computes it: `auto` is bfloat16 there."""
    model, optimizer = config.model, config.optimizer
    if model.dtype == "auto":
        model = model.model_copy(update={"dtype": "bfloat16"})
    if optimizer.muon.dtype == "auto":
        muon = optimizer.muon.model_copy(update={"dtype": "bfloat16"})
        optimizer = optimizer.model_copy(update={"muon": muon})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def memory(config: RunConfig, rules: Rules = GPU) -> Memory:
    """What a device holds. `config.mesh` names every axis' size; `auto` dtypes are bfloat16.

    Raises `LrkvError` for a model or batch that the mesh cannot split.
    """
    return _memory(_Step.of(resolved(config)), rules)


def state_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes of a device's `parameters`, `optimizer` state and `gradients`: counted, not traced.

    Scalars, as the number of steps, are left out.
    """
    shares = share_of_parameters(config.model, sizes_of(config.mesh))
    adam = sum(count for group, count in shares.items() if group != "matrix")
    everything = adam + shares.get("matrix", 0)
    moment = jnp.dtype(config.optimizer.moments_dtype).itemsize
    return {
        "parameters": 4 * everything,
        "optimizer": moment * everything + 4 * adam,  # Adam's second moments are always float32
        "gradients": 4 * everything,
    }


def messages(config: RunConfig) -> list[Message]:
    """The collectives of one step that the program names; see `messages.messages_of`.

    What the compiler adds for tensor parallelism is not among them.
    """
    step = _Step.of(resolved(config))
    check_mesh(step.config, _mesh(step.mesh))
    jaxpr, arguments = _traced(step)
    return messages_of(Program.of(jaxpr, arguments), sizes_of(step.mesh))


def sizes_of(mesh: MeshConfig) -> dict[str, int]:
    """The mesh's sizes by axis."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def share_of_parameters(model: ModelConfig, sizes: dict[str, int]) -> dict[str, int]:
    """Parameters on one device by optimiser group: `matrix`, `embedding`, `head`, `vector`."""
    shares: dict[str, int] = {}
    for spec, leaf in _weights(model):
        count = math.prod(leaf.shape) // _pieces(spec.axes, leaf.shape, sizes)
        shares[spec.group] = shares.get(spec.group, 0) + count
    return shares


def matrices(model: ModelConfig, sizes: dict[str, int]) -> list[Matrices]:
    """What Muon orthogonalises, in the groups that the step shares out (`optim.spread`)."""
    mesh = SimpleNamespace(shape=sizes)
    groups: dict[Any, Any] = {}
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
def _weights(model: ModelConfig) -> list[tuple[WeightSpec, Any]]:
    leaves = jax.tree.leaves(abstract_parameters(model))
    return list(zip(jax.tree.leaves(specs(model)), leaves, strict=True))


def _pieces(axes, shape, sizes: dict[str, int]) -> int:
    places = partition(axes, shape, SimpleNamespace(shape=sizes))
    names = [n for entry in places for n in (entry if isinstance(entry, tuple) else (entry,)) if n]
    return math.prod(sizes[name] for name in names)


class _Step(NamedTuple):
    """The parts of a run that its step depends on: equal steps are traced once."""

    model: ModelConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig
    train: TrainConfig

    @classmethod
    def of(cls, config: RunConfig) -> _Step:
        steps = max(2, config.optimizer.warmup + 1)  # their number changes constants alone
        train = config.train.model_copy(update={"steps": steps, "tokens": None, "seed": 0})
        return cls(config.model, config.optimizer, config.mesh, train)

    @property
    def config(self) -> RunConfig:
        return RunConfig(name="plan", variants={}, attention="plan", **self._asdict())


@functools.lru_cache(maxsize=64)
def _memory(step: _Step, rules: Rules) -> Memory:
    check_mesh(step.config, _mesh(step.mesh))
    jaxpr, arguments = _traced(_tensor_shard(step))
    # The last argument is the batch, which the step does not own.
    found = peak(jaxpr, arguments, range(len(arguments) - 1), rules)
    return Memory(
        **state_bytes(step.config),
        kept=found.kept,
        peak=found.bytes,
        at_peak=found.by_kind,
        largest=tuple(found.largest),
    )


def _mesh(mesh: MeshConfig) -> AbstractMesh:
    sizes = sizes_of(mesh)
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def abstract_step(
    config: RunConfig, mesh: Mesh | AbstractMesh
) -> tuple[TrainStep, TrainState, jax.ShapeDtypeStruct]:
    """The run's step on a mesh, and the shapes that it takes: its state and a batch."""
    rows = RowFormat.of(config, bos=0)  # which one it is changes no shape
    step = make_train_step(config, mesh, np.ones(config.model.vocabulary, np.int32), rows)
    shape = (config.train.batch, config.train.context + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    return step, abstract_state(config, mesh), tokens


@functools.lru_cache(maxsize=8)
def _traced(step: _Step) -> tuple[Any, tuple[Array, ...]]:
    """The step's jaxpr, and its arguments as one device holds them."""
    mesh = _mesh(step.mesh)
    program, state, tokens = abstract_step(step.config, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = program.on_leaves.trace(jax.tree.leaves(state), tokens).jaxpr
    parts = (
        ("other", state.step), ("parameters", state.params), ("optimizer", state.opt_state),
        ("key", state.rng), ("other", state.guard), ("parameters", state.teacher),
        ("batch", tokens),
    )  # fmt: skip
    arguments = [
        Array(leaf.shape, leaf.dtype, math.prod(leaf.sharding.shard_shape(leaf.shape)), kind)
        for kind, part in parts
        for leaf in jax.tree.leaves(part)
    ]
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(arguments)


def _tensor_shard(step: _Step) -> _Step:
    """The step of one tensor shard by itself: a share of the heads, the MLP and the vocabulary.

    Its arrays have the sizes of a device's where the compiler splits them over `tensor`, which a
    traced program does not show.
    """
    tensor, model = step.mesh.tensor, step.model
    if tensor == 1:
        return step
    shared = model.vocabulary % tensor == 0
    model = model.model_copy(update={
        "heads": model.heads // tensor, "attention": model.attention.on_shard(model, tensor),
        "feed_forward": model.feed_forward_width // tensor,
        "vocabulary": model.vocabulary // tensor if shared else model.vocabulary,
    })  # fmt: skip
    return step._replace(model=model, mesh=step.mesh.model_copy(update={"tensor": 1}))
