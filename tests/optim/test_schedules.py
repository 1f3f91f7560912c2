"""Schedules: their end points, their shape, and what they refuse."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.config.schema import MuonConfig, OptimizerConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.optim import learning_rates, momentum_schedule, schedule

STEPS = 64  # evaluated at once; a longer axis than any run below


def factors(total_steps, **options):
    """The factor at steps 0 to STEPS − 1, a run's last step repeated or not."""
    factor = schedule(OptimizerConfig(**options), total_steps)
    return np.broadcast_to(np.asarray(factor(jnp.arange(STEPS))), STEPS)


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    f = factors(50, warmup_steps=8)
    np.testing.assert_allclose(f[:8], np.arange(1, 9) / 8, rtol=1e-6)
    assert f[8] < 1


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_is_at_the_peak(kind, warmup):
    assert factors(50, warmup_steps=warmup, schedule=kind)[0] == 1


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("constant", [0.0, 0.5])
def test_last_step_is_at_the_final_rate_and_stays_there(kind, final, constant):
    f = factors(50, warmup_steps=10, schedule=kind, min_lr_ratio=final, constant=constant)
    assert f[48] > final + 1e-4
    np.testing.assert_allclose(f[49:], final, atol=1e-6)


def test_falls_as_its_formula_says():
    # The peak is step 9, the last of the warm-up; 40 steps later the run is at its last, 49.
    share = np.arange(1, 41) / 40
    linear = factors(50, warmup_steps=10, schedule="linear", min_lr_ratio=0.1)
    np.testing.assert_allclose(linear[10:50], 1 - 0.9 * share, atol=1e-6)
    cosine = factors(50, warmup_steps=10, schedule="cosine", min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * s)) / 2 for s in share]
    np.testing.assert_allclose(cosine[10:50], expected, atol=1e-6)


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


@pytest.mark.parametrize("warmup", [10, 11])
def test_a_warm_up_as_long_as_the_run_is_refused(warmup):
    with pytest.raises(
        LrkvError, match=rf"optimizer\.warmup_steps = {warmup} .* 10 steps.*at most 9"
    ):
        schedule(OptimizerConfig(warmup_steps=warmup), 10)


def test_learning_rates_are_base_times_factor():
    config = OptimizerConfig(warmup_steps=4, matrix_lr=0.02, embedding_lr=0.2, head_lr=0.004)
    rates = learning_rates(config, 50)
    assert rates(1) == pytest.approx({"matrix": 0.01, "embedding": 0.1, "head": 0.002})
    assert rates(49) == pytest.approx({"matrix": 0.002, "embedding": 0.02, "head": 0.0004})


def test_momentum_rises_linearly_to_its_value():
    momentum = momentum_schedule(
        MuonConfig(momentum=0.95, momentum_start=0.85, momentum_warmup=300)
    )
    for step, expected in {0: 0.85, 150: 0.9, 300: 0.95, 1000: 0.95}.items():
        assert momentum(step) == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"momentum_start": 0.5, "momentum_warmup": 0}])
def test_momentum_without_warm_up_is_constant(options):
    momentum = momentum_schedule(MuonConfig(momentum=0.9, **options))
    assert momentum(0) == momentum(7) == 0.9
