"""A training step compiled by XLA for a mesh of simulated CPU devices; nothing is allocated.

A CPU's program differs from a GPU's in three ways: it gathers bfloat16 as float32, it writes to
memory what a GPU computes again from its operands, and it has no host memory to offload to.
"""

import os
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.plan import hlo
from lrkv_jax.models.accounting.timing import Collective
from lrkv_jax.training.state import abstract_state
from lrkv_jax.training.step import make_train_step
from lrkv_jax.training.token_batch import BatchFormat

# The scheduler that a CPU runs by default orders a program for parallel threads: the stacks of all
# loops then exist from the start. A GPU's program is ordered for memory.
FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


@dataclass(frozen=True)
class CompiledStep:
    """XLA's figures of one step on one device, in bytes; `seconds` is what compiling it took.

    `total` is arguments, output and temporaries, less `alias`, the output that overwrites
    arguments. `product_flops` are the FLOPs of all matrix products, Newton–Schulz included.
    """

    seconds: float
    arguments: int
    output: int
    temporary: int
    alias: int
    total: int
    product_flops: int
    collectives: list[Collective]


def simulate(devices: int) -> None:
    """Let JAX, which must not have started yet, take this machine's CPU for so many devices."""
    flags = (os.environ.get("XLA_FLAGS", ""), FLAGS)
    count = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = " ".join((*flags, count)).strip()


def compiled_step(config: RunConfig, devices: int) -> CompiledStep:
    """Lower and compile the run's step from shapes alone; every axis of its mesh has a size.

    Raises `LrkvError` where JAX has started with fewer CPU devices, and for a model or a batch that
    the mesh cannot split.
    """
    here = jax.devices("cpu")
    if len(here) < devices:
        raise LrkvError(
            f"{devices} devices cannot be simulated here, where JAX has started with "
            f"{len(here)}: set XLA_FLAGS=--xla_force_host_platform_device_count={devices} first"
        )
    start = time.perf_counter()
    program = _compile(config, make_mesh(config.mesh, here[:devices]))
    seconds = time.perf_counter() - start
    memory, text = program.memory_analysis(), program.as_text()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
    }
    return CompiledStep(
        seconds, **sizes, total=sum(sizes.values()) - 2 * sizes["alias"],
        product_flops=hlo.product_flops(text),
        collectives=hlo.sent(text, devices, jnp.dtype(config.model.dtype).itemsize),
    )  # fmt: skip


def _compile(config: RunConfig, mesh: Mesh) -> jax.stages.Compiled:
    rows = BatchFormat.of(config, bos=0)  # which token it is changes no shape
    token_bytes = np.ones(config.model.vocabulary, np.int32)
    step = make_train_step(config, mesh, token_bytes, rows)
    shape = (config.train.batch, config.train.context + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return step.lower(abstract_state(config, mesh), tokens).compile()
