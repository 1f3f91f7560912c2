"""The guard on the numbers: which steps may reach the parameters, decided on the devices.

A step whose loss or gradient norm is not finite leaves parameters and optimizer state as they
were. A loss far above the last ones is a spike: it is reported, and with `guard.skip_spikes` its
step is skipped too. The distance is in robust deviations of the last losses, so that one spike does
not hide the next: (loss - median) / (1.4826 * median absolute deviation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lrkv_jax.config.schema import GuardConfig

# W losses are remembered; there is no spike before there are as many.
WINDOW = 64
# A normal distribution's standard deviation over its median absolute deviation.
_SIGMA = 1.4826
# Losses that hardly move have a deviation near 0, and then anything would be far.
_MIN_DEVIATION = 1e-3  # of the median


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuardState:
    """The last W finite losses (NaN: none yet), and the steps skipped in all and in a row."""

    losses_W: Float[Array, "W"]
    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]

    @classmethod
    def fresh(cls) -> GuardState:
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.full(WINDOW, jnp.nan, jnp.float32), zero, zero)


def check_step(
    config: GuardConfig,
    state: GuardState,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
) -> tuple[Bool[Array, ""], GuardState, Float[Array, ""]]:
    """Whether the step may be taken, the guard's next state, and the loss's deviations.

    Deviations are robust ones above the median; NaN while fewer than W losses are known.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    deviations = _deviations(state.losses_W, loss)
    take = finite
    if config.skip_spikes and config.spike is not None:
        take &= ~(deviations > config.spike)
    # A skipped spike is remembered too: after half a window of such losses, they are the normal.
    remembered = jnp.where(jnp.isfinite(loss), loss, state.losses_W[step % WINDOW])
    losses_W = state.losses_W.at[step % WINDOW].set(remembered)
    new = GuardState(
        losses_W,
        jnp.where(take, state.skipped, state.skipped + 1),
        jnp.where(take, 0, state.in_a_row + 1),
    )
    return take, new, deviations


def _deviations(losses_W: Float[Array, "W"], loss: Float[Array, ""]) -> Float[Array, ""]:
    median = _median(losses_W)
    spread = _SIGMA * _median(jnp.abs(losses_W - median))
    return (loss - median) / jnp.maximum(spread, _MIN_DEVIATION * jnp.abs(median))


def _median(values_W: Float[Array, "W"]) -> Float[Array, ""]:
    """NaN if one is: they sort to the end, and `jnp.median` would search for them separately."""
    ordered_W = jnp.sort(values_W)
    middle = (ordered_W[WINDOW // 2 - 1] + ordered_W[WINDOW // 2]) / 2
    return jnp.where(jnp.isnan(ordered_W[-1]), jnp.nan, middle)


def select(take: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The new tree if the step is taken, else the old one, bit for bit."""
    return jax.tree.map(lambda n, o: jnp.where(take, n, o), new, old)
