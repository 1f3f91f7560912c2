"""A training step as a compiled program, and what times it.

B sequences  T positions
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.compilation import Compiled, compile_ahead
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.training.state import abstract_state, init_state
from lrkv_jax.training.step import make_train_step


class TrainProgram:
    """One configuration's step, compiled from shapes alone; nothing is allocated."""

    def __init__(self, config: RunConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        train = config.train
        # Every id stands for a byte: what a token is worth in bytes costs no time.
        token_bytes_V = np.ones(config.model.vocabulary, np.int32)
        step = make_train_step(config, mesh, token_bytes_V)
        tokens_BU = jax.ShapeDtypeStruct(
            (train.batch, train.context + 1), jnp.int32, sharding=batch_sharding(mesh)
        )
        state = abstract_state(config, mesh)
        self.step: Compiled = compile_ahead(step, state, tokens_BU, mesh=mesh)

    @property
    def state_bytes(self) -> int:
        """Bytes that one device holds between steps: parameters, moments, and a batch."""
        return self.step.call.memory_analysis().argument_size_in_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes that one device holds in a step beside its arguments; a donated state is one."""
        memory = self.step.call.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


class Trainer:
    """A configuration in training: its state, a random batch, and a timer of its step."""

    def __init__(self, program: TrainProgram, seed: int):
        self.program = program
        config, mesh = program.config, program.mesh
        before = _device_bytes(mesh)
        with jax.set_mesh(mesh):
            self._state = init_state(config, mesh)
        self.tokens_BU = random_tokens(config, mesh, seed)
        self._state, metrics = program.step.call(self._state, self.tokens_BU)
        self.first_loss = float(jax.block_until_ready(metrics)["loss"])
        self.device_peak = _peak_of_this(before, _device_bytes(mesh))

    def timer(self) -> float:
        """Seconds from the call of a step until the new state is there."""
        began = time.perf_counter()
        self._state, metrics = self.program.step.call(self._state, self.tokens_BU)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - began


def random_tokens(config: RunConfig, mesh: Mesh, seed: int) -> Int[Array, "B U"]:
    """A batch of uniformly random ids, U = T + 1: what they are costs no time."""
    shape = (config.train.batch, config.train.context + 1)
    ids_BU = np.random.default_rng(seed).integers(0, config.model.vocabulary, shape, np.int32)
    return jax.device_put(ids_BU, batch_sharding(mesh))


def _device_bytes(mesh: Mesh) -> list[tuple[int, int]] | None:
    """(in use, peak so far) of each local device, or None where the allocator does not say."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if not all(stats) or any("peak_bytes_in_use" not in s for s in stats):
        return None
    return [(s["bytes_in_use"], s["peak_bytes_in_use"]) for s in stats]


def _peak_of_this(before: list | None, after: list | None) -> int | None:
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
