"""One optimizer step: a gradient, an update, metrics; pure, jitted once.

B sequences  T positions
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.rules import batch_sharding, replicated
from lrkv_jax.optim import learning_rates
from lrkv_jax.training.checkpointing.fingerprint import fingerprint
from lrkv_jax.training.guard import check_step, select
from lrkv_jax.training.loss import bits_per_byte, make_gradient
from lrkv_jax.training.state import TrainState, learning_specs, optimizer_of, state_shardings
from lrkv_jax.training.token_batch import PLAIN, BatchFormat


def make_train_step(
    config: RunConfig,
    mesh: Mesh | AbstractMesh,
    token_bytes_V: np.ndarray,
    batch_format: BatchFormat = PLAIN,
) -> Any:
    """The run's step on a mesh, jitted: (state, tokens [B, T + 1]) → (state, metrics).

    It consumes the state. Metrics are scalars by name: `loss` (nats per target), `bpb` (specials
    excluded), `grad_norm` before clipping, each group's learning rate, what the guard found
    (`spike`, `skipped`, `in_a_row`), and a fingerprint of the `batch`.
    """
    optimizer = optimizer_of(config)
    gradient = make_gradient(config, mesh, token_bytes_V, batch_format)
    weights = learning_specs(config)
    rates = learning_rates(config.optimizer, config.train.total_steps)
    shardings = state_shardings(config, mesh)

    def step(state: TrainState, tokens_BU):
        (loss, nats, num_bytes), grads = gradient(state.params, tokens_BU, state.teacher)
        # No gradient of what does not learn: it counts in no norm.
        grads = jax.tree.map(
            lambda g, spec: jnp.zeros_like(g) if spec.group == "still" else g, grads, weights
        )
        grad_norm = optax.tree.norm(grads)
        take, guard, deviations = check_step(config.guard, state.guard, state.step, loss, grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "bpb": bits_per_byte(nats, num_bytes),
            "grad_norm": grad_norm,
            # The optimizer counts the steps that it has taken.
            **{f"lr_{g}": r for g, r in rates(state.step - state.guard.skipped).items()},
            "spike": deviations,
            "skipped": guard.skipped,
            "in_a_row": guard.in_a_row,
            "batch": fingerprint(tokens_BU)[0],
        }
        state = TrainState(
            state.step + 1,
            select(take, params, state.params),
            select(take, opt_state, state.opt_state),
            state.rng,
            guard,
            state.teacher,
        )
        return state, metrics

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
    )
