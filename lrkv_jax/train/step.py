"""One optimiser step: a gradient, an update, metrics; pure, jitted once.

B sequences  T positions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from lrkv_jax.checkpoint.fingerprint import fingerprint
from lrkv_jax.config import RunConfig
from lrkv_jax.model import specs
from lrkv_jax.optim import global_norm, learning_rates
from lrkv_jax.sharding import batch_sharding, replicated
from lrkv_jax.train.guard import judge, unless
from lrkv_jax.train.loss import bits_per_byte, make_gradient
from lrkv_jax.train.rows import PLAIN, RowFormat
from lrkv_jax.train.state import TrainState, optimizer_of, state_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """A step's scalars in one array, N of them: one copy to the host instead of N."""

    values_N: Float[Array, "N"]
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, scalars: dict[str, Array]) -> StepMetrics:
        return cls(jnp.stack([jnp.float32(s) for s in scalars.values()]), tuple(scalars))

    def __getitem__(self, name: str) -> Float[Array, ""]:
        return self.values_N[self.names.index(name)]

    def floats(self) -> dict[str, float]:
        """All of them on the host, when the step is done."""
        return dict(zip(self.names, np.asarray(self.values_N).tolist(), strict=True))


def make_train_step(
    config: RunConfig, mesh: Mesh, token_bytes_V: np.ndarray, rows: RowFormat = PLAIN
) -> Callable[[TrainState, Int[Array, "B U"]], tuple[TrainState, StepMetrics]]:
    """The jitted step: (state, tokens [B, T + 1]) → (state, metrics); it consumes the state.

    Gradients of `accumulation` microbatches are averaged before the optimiser sees them. Metrics
    are scalars: `loss` (nats a target), `bpb` (specials excluded), `grad_norm` before clipping,
    each group's learning rate, what the guard says (`spike`, `skipped`, `in_a_row`), and two halves
    of the batch's fingerprint.
    """
    optimizer = optimizer_of(config)
    gradient = make_gradient(config, mesh, token_bytes_V, rows)
    weights = specs(config.model)
    rates = learning_rates(config.optimizer, config.train.total_steps)

    def step(state: TrainState, tokens_BU):
        (loss, nats, num_bytes), grads = gradient(state.params, tokens_BU)
        grad_norm = global_norm(grads, weights)
        take, guard, height = judge(config.guard, state.guard, state.step, loss, grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        batch = fingerprint(tokens_BU)[0]
        metrics = {
            "loss": loss,
            "bpb": bits_per_byte(nats, num_bytes),
            "grad_norm": grad_norm,
            # The optimiser counts the steps that it has taken.
            **{f"lr_{g}": r for g, r in rates(state.step - state.guard.skipped).items()},
            "spike": height,
            "skipped": guard.skipped,
            "in_a_row": guard.in_a_row,
            # Two halves of 16 bits, which float32 holds exactly.
            "batch_high": batch >> 16,
            "batch_low": batch & 0xFFFF,
        }
        state = TrainState(
            state.step + 1,
            unless(take, params, state.params),
            unless(take, opt_state, state.opt_state),
            state.rng,
            guard,
        )
        return state, StepMetrics.of(metrics)

    placed = state_shardings(config, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, batch_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
    )


def over_leaves(
    step: Callable[[TrainState, Int[Array, "B U"]], tuple[TrainState, StepMetrics]],
    state: TrainState,
    mesh: Mesh,
) -> Callable[[list[Array], Int[Array, "B U"]], tuple[list[Array], StepMetrics]]:
    """A jitted step on the leaves of a state like `state` (abstract, placed); it consumes them.

    Calling it takes 0.6 of the host's time: no tree of 36 arrays is taken apart and put together.
    """
    leaves, tree = jax.tree.flatten(state)
    placed = [leaf.sharding for leaf in leaves]

    def flat(leaves, tokens_BU):
        state, metrics = step(jax.tree.unflatten(tree, leaves), tokens_BU)
        return jax.tree.leaves(state), metrics

    return jax.jit(
        flat,
        donate_argnums=0,
        in_shardings=(placed, batch_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
    )
