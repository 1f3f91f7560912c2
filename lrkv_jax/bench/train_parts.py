"""A training step and its parts as compiled programs, and what times them.

B sequences  T positions
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from lrkv_jax.bench import clock
from lrkv_jax.config import RunConfig
from lrkv_jax.runtime.compilation import Compiled, compile_ahead
from lrkv_jax.sharding import batch_sharding
from lrkv_jax.train.loss import make_gradient, make_loss
from lrkv_jax.train.state import abstract_state, init_state
from lrkv_jax.train.step import make_train_step


@dataclass(frozen=True)
class Parts:
    """One configuration's programs: the step that consumes its state, its gradient, its loss."""

    config: RunConfig
    mesh: Mesh
    step: Compiled
    gradient: Compiled
    loss: Compiled

    @property
    def state_bytes(self) -> int:
        """Bytes that one device holds between steps: parameters, moments, and a batch."""
        return self.step.call.memory_analysis().argument_size_in_bytes

    @property
    def step_bytes(self) -> int:
        """What one device holds in a step, by XLA's analysis; a donated state counts once."""
        memory = self.step.call.memory_analysis()
        return memory.argument_size_in_bytes + _beside_arguments(memory)

    @property
    def transient_bytes(self) -> int:
        """The most that any of the programs takes on one device beside its arguments."""
        programs = (self.step, self.gradient, self.loss)
        return max(_beside_arguments(program.call.memory_analysis()) for program in programs)


def compile_parts(config: RunConfig, mesh: Mesh) -> Parts:
    """Compile the three from shapes alone; nothing is allocated."""
    train = config.train
    # Every id stands for a byte: what a token is worth in bytes costs no time.
    token_bytes_V = np.ones(config.model.vocabulary, np.int32)
    state = abstract_state(config, mesh)
    tokens_BU = jax.ShapeDtypeStruct(
        (train.batch, train.context + 1), jnp.int32, sharding=batch_sharding(mesh)
    )
    step = make_train_step(config, mesh, token_bytes_V)
    gradient = jax.jit(make_gradient(config, mesh, token_bytes_V))
    loss = jax.jit(make_loss(config.model, mesh, chunk=train.loss_chunk))
    return Parts(
        config,
        mesh,
        compile_ahead(step.on_leaves, jax.tree.leaves(state), tokens_BU, mesh=mesh),
        compile_ahead(gradient, state.params, tokens_BU, mesh=mesh),
        compile_ahead(loss, state.params, tokens_BU, mesh=mesh),
    )


class Subject:
    """A configuration in training: its state, a random batch, and timers of its parts.

    `dispatch` collects the seconds from each call of the step to its return.
    """

    def __init__(self, parts: Parts, seed: int):
        self.parts = parts
        self.dispatch: list[float] = []
        config, mesh = parts.config, parts.mesh
        before = _device_bytes(mesh)
        with jax.set_mesh(mesh):
            self._leaves, self._tree = jax.tree.flatten(init_state(config, mesh))
        self.tokens_BU = random_tokens(config, mesh, seed)
        self._leaves, metrics = parts.step.call(self._leaves, self.tokens_BU)
        self.first_loss = float(jax.block_until_ready(metrics)["loss"])
        self.device_peak = _own_peak(before, _device_bytes(mesh))

    @property
    def timers(self) -> list[clock.Timer]:
        """Timers of one step, of the loss with its gradient, and of the loss alone."""
        parts = self.parts
        return [self._step, partial(self._seconds, parts.gradient),
                partial(self._seconds, parts.loss)]  # fmt: skip

    def _step(self) -> float:
        """Seconds from the call until the new state is there."""
        began = time.perf_counter()
        self._leaves, metrics = self.parts.step.call(self._leaves, self.tokens_BU)
        returned = time.perf_counter()
        jax.block_until_ready((self._leaves, metrics))
        self.dispatch.append(returned - began)
        return time.perf_counter() - began

    def _seconds(self, program: Compiled) -> float:
        params = jax.tree.unflatten(self._tree, self._leaves).params
        began = time.perf_counter()
        jax.block_until_ready(program.call(params, self.tokens_BU))
        return time.perf_counter() - began


def random_tokens(config: RunConfig, mesh: Mesh, seed: int) -> Int[Array, "B U"]:
    """A batch of uniformly random ids, U = T + 1: what they are costs no time."""
    shape = (config.train.batch, config.train.context + 1)
    ids_BU = np.random.default_rng(seed).integers(0, config.model.vocabulary, shape, np.int32)
    return jax.device_put(ids_BU, batch_sharding(mesh))


def _beside_arguments(memory: Any) -> int:
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _device_bytes(mesh: Mesh) -> list[tuple[int, int]] | None:
    """(in use, peak so far) of each local device, or None where the allocator does not say."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if not all(stats) or any("peak_bytes_in_use" not in s for s in stats):
        return None
    return [(s["bytes_in_use"], s["peak_bytes_in_use"]) for s in stats]


def _own_peak(before: list | None, after: list | None) -> int | None:
    """Bytes of the device that held most, beyond what it held before; None if not known.

    An allocator's peak is of the whole process: it is this subject's own only where it rose.
    """
    if before is None or after is None:
        return None
    risen = [
        peak - used
        for (used, old_peak), (_, peak) in zip(before, after, strict=True)
        if peak > old_peak
    ]
    return max(risen) if len(risen) == len(before) else None
