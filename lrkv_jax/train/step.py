"""One optimiser step: a gradient, an update, metrics; pure, jitted once.

B sequences  T positions
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from lrkv_jax.config import RunConfig
from lrkv_jax.model import specs
from lrkv_jax.optim import global_norm, learning_rates
from lrkv_jax.sharding import batch_sharding, replicated
from lrkv_jax.train.loss import bits_per_byte, make_gradient
from lrkv_jax.train.state import TrainState, optimizer_of, state_shardings


def make_train_step(
    config: RunConfig, mesh: Mesh, token_bytes_V: np.ndarray
) -> Callable[[TrainState, Int[Array, "B U"]], tuple[TrainState, dict[str, Array]]]:
    """The jitted step: (state, tokens [B, T + 1]) → (state, metrics); it consumes the state.

    Gradients of `accumulation` microbatches are averaged before the optimiser sees them. Metrics
    are scalars: `loss` (nats a token), `bpb` (specials excluded), `grad_norm` before clipping and
    each group's learning rate.
    """
    optimizer, gradient = optimizer_of(config), make_gradient(config, mesh, token_bytes_V)
    weights = specs(config.model)
    rates = learning_rates(config.optimizer, config.train.total_steps)

    def step(state: TrainState, tokens_BU):
        (loss, nats, num_bytes), grads = gradient(state.params, tokens_BU)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "bpb": bits_per_byte(nats, num_bytes),
            "grad_norm": global_norm(grads, weights),
            **{f"lr_{group}": rate for group, rate in rates(state.step).items()},
        }
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    placed = state_shardings(config, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, batch_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
    )
