"""One optimiser step: a gradient, an update, metrics; pure, jitted once.

B sequences  T positions
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.rules import batch_sharding, replicated
from lrkv_jax.optim import global_norm, learning_rates
from lrkv_jax.training.checkpointing.fingerprint import fingerprint
from lrkv_jax.training.guard import judge, unless
from lrkv_jax.training.loss import bits_per_byte, make_gradient
from lrkv_jax.training.rows import PLAIN, RowFormat
from lrkv_jax.training.state import TrainState, learning_specs, optimizer_of, state_shardings


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


@dataclass(frozen=True)
class TrainStep:
    """A jitted step: (state, tokens [B, T + 1]) → (state, metrics); it consumes the state.

    `on_leaves` is the program itself, for a loop: it takes and gives the list of the state's
    leaves. Calling it takes 0.6 of the host's time: no tree of 36 arrays is taken apart and put
    together. `tree` is the state's structure.
    """

    on_leaves: Any
    tree: Any

    def __call__(
        self, state: TrainState, tokens_BU: Int[Array, "B U"]
    ) -> tuple[TrainState, StepMetrics]:
        leaves, metrics = self.on_leaves(jax.tree.leaves(state), tokens_BU)
        return self.tree.unflatten(leaves), metrics


def make_train_step(
    config: RunConfig,
    mesh: Mesh | AbstractMesh,
    token_bytes_V: np.ndarray,
    rows: RowFormat = PLAIN,
) -> TrainStep:
    """The run's step on a mesh.

    Gradients of `accumulation` microbatches are averaged before the optimiser sees them. Metrics
    are scalars: `loss` (nats per target), `bpb` (specials excluded), `grad_norm` before clipping,
    each group's learning rate, what the guard says (`spike`, `skipped`, `in_a_row`), and two halves
    of the batch's fingerprint.
    """
    optimizer = optimizer_of(config)
    gradient = make_gradient(config, mesh, token_bytes_V, rows)
    weights = learning_specs(config)
    rates = learning_rates(config.optimizer, config.train.total_steps)
    placed, tree = jax.tree.flatten(state_shardings(config, mesh))

    def step(leaves, tokens_BU):
        state: TrainState = tree.unflatten(leaves)
        (loss, nats, num_bytes), grads = gradient(state.params, tokens_BU, state.teacher)
        grads = jax.tree.map(_still, grads, weights)
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
            state.teacher,
        )
        return jax.tree.leaves(state), StepMetrics.of(metrics)

    on_leaves = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, batch_sharding(mesh)),
        out_shardings=(placed, replicated(mesh)),
    )
    return TrainStep(on_leaves, tree)


def _still(grad, spec):
    """No gradient of what does not learn: it counts in no norm."""
    return jnp.zeros_like(grad) if spec.group == "still" else grad
