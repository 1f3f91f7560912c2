"""Schedules of learning rates and Muon's momentum by step, from optax's pieces."""

from collections.abc import Callable

import chex
import jax.numpy as jnp
import optax

from lrkv_jax.config.schema import MuonConfig, OptimizerConfig
from lrkv_jax.errors import LrkvError


def schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The factor in [0, 1] on every learning rate, for steps 0 to total_steps − 1.

    Step s of the warm-up is at (s + 1)/warmup, so the first step moves; then `constant` of the
    steps that follow stay at 1, and the rest fall to `min_lr_ratio`, reached on the last step.
    Raises LrkvError when the warm-up leaves no step after it.
    """
    warmup = config.warmup_steps
    if warmup >= total_steps:
        raise LrkvError(
            f"optimizer.warmup_steps = {warmup} does not end within {total_steps} steps: "
            f"use at most {total_steps - 1}, or a longer run"
        )
    rise = optax.constant_schedule(1.0)
    if warmup > 1:  # and stays at 1 when it is there
        rise = optax.linear_schedule(1 / warmup, 1.0, warmup - 1)
    constant = round(config.constant * (total_steps - warmup))
    last_at_peak = max(warmup + constant - 1, 0)
    falling = total_steps - 1 - last_at_peak
    if config.schedule == "constant" or falling == 0:
        return rise
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(1.0, falling, alpha=config.min_lr_ratio)
    else:
        fall = optax.linear_schedule(1.0, config.min_lr_ratio, falling)

    def down(step):
        # Rounding takes the last step a little below, and past 0.
        return jnp.maximum(fall(step), config.min_lr_ratio)

    return optax.join_schedules([rise, down], [last_at_peak])


def momentum_schedule(config: MuonConfig) -> optax.Schedule:
    """Muon's momentum: linear from `momentum_start` over `momentum_warmup` steps, or constant."""
    if config.momentum_start is None or config.momentum_warmup == 0:
        return optax.constant_schedule(config.momentum)
    return optax.linear_schedule(config.momentum_start, config.momentum, config.momentum_warmup)


def learning_rates(
    config: OptimizerConfig, total_steps: int
) -> Callable[[chex.Numeric], dict[str, chex.Numeric]]:
    """The learning rate of each group at a step, for the logs and for the optimizer itself."""
    factor = schedule(config, total_steps)
    peaks = {
        "matrix": config.matrix_lr,
        "embedding": config.embedding_lr,
        "head": config.head_lr,
    }
    return lambda step: {group: peak * factor(step) for group, peak in peaks.items()}
