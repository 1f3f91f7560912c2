"""No number that is not one reaches the parameters, and spikes are told by their distance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.config.schema import GuardConfig
from lrkv_jax.training.guard import WINDOW, GuardState, check_step

check_step = jax.jit(check_step, static_argnums=0)
WATCH, SKIP = GuardConfig(spike=6.0), GuardConfig(spike=6.0, skip_spikes=True)


def after(losses, config=WATCH, norms=None):
    """Which steps were taken, the guard's state after them, and the last one's height."""
    state, taken = GuardState.fresh(), []
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True)):
        take, state, height = check_step(
            config, state, jnp.int32(step), jnp.float32(loss), jnp.float32(norm)
        )
        taken.append(bool(take))
    return taken, state, float(height)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.125, 100, width=32), min_size=WINDOW, max_size=WINDOW),
    st.floats(0, 200, width=32),
)
def test_a_spikes_height_is_numpys(losses, loss):
    state = GuardState(jnp.float32(losses), jnp.int32(0), jnp.int32(0))
    _, _, height = check_step(WATCH, state, jnp.int32(WINDOW), jnp.float32(loss), jnp.float32(1))
    median = np.median(np.float64(losses))
    deviation = 1.4826 * np.median(np.abs(np.float64(losses) - median))
    expected = (loss - median) / max(deviation, 1e-3 * median)
    assert float(height) == pytest.approx(expected, rel=2e-3, abs=1e-3 * (1 + abs(expected)))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_is_never_taken_and_counted(bad):
    losses = [3.0, bad, 3.0, bad, bad]
    taken, state, _ = after(losses)
    assert taken == [True, False, True, False, False]
    assert (int(state.skipped), int(state.in_a_row)) == (3, 2)
    taken, state, _ = after([3.0] * 4, norms=[1.0, bad, bad, 1.0])
    assert taken == [True, False, False, True] and int(state.in_a_row) == 0


def test_a_spike_is_told_and_left_out_if_asked():
    # There is none before a window of losses.
    taken, _, height = after([2.0] * (WINDOW - 1) + [1e9], SKIP)
    assert all(taken) and np.isnan(height)
    noise = 3 + 0.05 * np.random.default_rng(0).normal(size=WINDOW)
    for config, expected in ((WATCH, True), (SKIP, False)):
        taken, state, height = after([*noise, 4.0], config)
        assert taken[-1] is expected and height > 6
        assert int(state.skipped) == (not expected)
    # What is low is no spike, however far.
    assert after([*noise, 0.1], SKIP)[0][-1]


def test_spikes_do_not_hide_each_other_and_a_new_level_becomes_the_normal():
    noise = 3 + 0.05 * np.random.default_rng(1).normal(size=WINDOW)
    taken, _, height = after([*noise, *[9.0] * 10], SKIP)
    assert taken[-10:] == [False] * 10 and height > 50
    taken, _, _ = after([*noise, *[9.0 + 0.01 * i for i in range(WINDOW)]], SKIP)
    assert not taken[WINDOW] and taken[-1]
