"""Schedules: their shape, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.config.schema import MuonConfig, OptimizerConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.optim import momentum_schedule, schedule

STEPS = 64  # evaluated at once; a longer axis than any run below


def factors(total_steps, **options):
    """The factor at steps 0 to STEPS − 1, a run's last step repeated or not."""
    factor = schedule(OptimizerConfig(**options), total_steps)
    return np.broadcast_to(np.asarray(factor(jnp.arange(STEPS))), STEPS)


@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_rises_stays_and_falls_as_its_formula_says(constant):
    """To the peak at step 9, the last of the warm-up; to the final rate at step 49, the run's."""
    flat = round(40 * constant)
    share = np.arange(1, 41 - flat) / (40 - flat)
    falls = {"linear": 1 - 0.9 * share, "cosine": 0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2}
    for kind, fall in falls.items():
        expected = np.r_[np.arange(1, 11) / 10, np.ones(flat), fall, np.full(STEPS - 50, 0.1)]
        f = factors(50, warmup_steps=10, schedule=kind, min_lr_ratio=0.1, constant=constant)
        np.testing.assert_allclose(f, expected, atol=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_rises_then_falls_within_its_bounds(data):
    total = data.draw(st.integers(1, STEPS))
    warmup = data.draw(st.integers(0, total - 1))
    final = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    kind = data.draw(st.sampled_from(["cosine", "linear", "constant"]))
    constant = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    f = factors(total, warmup_steps=warmup, min_lr_ratio=final, schedule=kind, constant=constant)[
        :total
    ]
    rounding = 1e-6
    assert np.all(f > min(final, 1 / max(warmup, 1)) - rounding) and np.all(f < 1 + rounding)
    peak = max(warmup - 1, 0)
    assert f[peak] == pytest.approx(1, abs=rounding)
    assert np.all(np.diff(f[: peak + 1]) > 0)
    assert np.all(np.diff(f[peak:]) < rounding)


def test_a_warm_up_as_long_as_the_run_is_refused():
    message = r"optimizer\.warmup_steps = 10 .* 10 steps.*at most 9"
    with pytest.raises(LrkvError, match=message):
        schedule(OptimizerConfig(warmup_steps=10), 10)


def test_momentum_rises_linearly_to_its_value_or_is_constant():
    rising = MuonConfig(momentum=0.95, momentum_start=0.85, momentum_warmup=300)
    for config, expected in (
        (rising, {0: 0.85, 150: 0.9, 300: 0.95, 1000: 0.95}),
        (MuonConfig(momentum=0.9), {0: 0.9, 7: 0.9}),
        (MuonConfig(momentum=0.9, momentum_start=0.5, momentum_warmup=0), {0: 0.9, 7: 0.9}),
    ):
        momentum = momentum_schedule(config)
        for step, value in expected.items():
            assert momentum(step) == pytest.approx(value)
