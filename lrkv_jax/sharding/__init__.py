"""The mesh, where each array lies on it, and what devices tell each other in a training step."""

from lrkv_jax.sharding.mesh import AXES, check_mesh, in_use, make_mesh
from lrkv_jax.sharding.rules import (
    BATCH,
    RULES,
    batch_sharding,
    constrain_batch,
    parameter_shardings,
    partition,
    replicated,
)
