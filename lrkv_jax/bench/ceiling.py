"""The most that this machine's matrix products reach: the yardstick of a measured MFU.

N side of a square matrix
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lrkv_jax.bench import clock

# Large enough for the library's best rate, small enough to be sampled often.
SIDE = {"cpu": 2048, "gpu": 8192}
IN_A_ROW = {"cpu": 1, "gpu": 8}  # on a GPU the host must stay ahead of the device


def side() -> int:
    """N here."""
    return SIDE["cpu" if jax.default_backend() == "cpu" else "gpu"]


def matmul_timer(mesh: Mesh, dtype: str) -> tuple[clock.Timer, float]:
    """(timer, FLOPs): seconds of one N × N product in `dtype` on every device of the mesh at once.

    FLOPs are those of all devices together. Values are random: a GPU's clock depends on them.
    """
    N, devices = side(), mesh.size
    calls = IN_A_ROW["cpu" if jax.default_backend() == "cpu" else "gpu"]
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def make(seed: int, std: float):
        shape = (devices, N, N)
        draw = jax.jit(
            lambda: (std * jax.random.normal(jax.random.key(seed), shape)).astype(dtype),
            out_shardings=where,
        )
        return draw()

    # Entries stay N(0, 1) however many products follow each other.
    x_dNN, w_dNN = make(0, 1.0), make(1, N**-0.5)

    @jax.jit
    def products(x_dNN, w_dNN):
        for _ in range(calls):
            x_dNN = jnp.matmul(x_dNN, w_dNN)
        return x_dNN

    return clock.timer(products, [(x_dNN, w_dNN)], calls, 1), 2.0 * N**3 * devices
