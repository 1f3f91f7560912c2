"""How much sooner a loss is reached, against closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrkv_jax.lab.report.comparison import Curve, Savings, savings, savings_over_seeds

STEPS = np.arange(1, 11) * 10.0


def curve(losses, *, steps=STEPS, flops_a_step=3.0, heldout=500):
    losses, steps = np.asarray(losses, float), np.asarray(steps, float)
    return Curve(steps, 100 * steps, flops_a_step * steps, losses, losses / 3, heldout)


LINE = curve(5.0 - STEPS / 100)  # 4.9 … 4.0


@given(st.floats(0.0, 0.39))
def test_a_shifted_line_is_ahead_by_its_shift(shift):
    """5 − s/100 − shift = 4 at s = 100·(1 − shift): sooner by the shift itself."""
    ours = savings(curve(LINE.cross_entropy - shift), LINE)
    assert ours.steps == pytest.approx(shift, abs=1e-9)
    assert ours.flops == pytest.approx(shift, abs=1e-9)


def test_flops_are_each_variant_s_own():
    cheap = savings(curve(LINE.cross_entropy - 0.2, flops_a_step=1.5), LINE)
    assert cheap.steps == pytest.approx(0.2) and cheap.flops == pytest.approx(1 - 0.8 / 2)


def test_the_same_curve_is_no_savings():
    assert savings(LINE, LINE) == Savings(0.0, 0.0)


def test_what_is_never_reached_is_none():
    assert savings(curve(LINE.cross_entropy + 0.01), LINE) == Savings(None, None)


def test_the_first_touch_counts_whatever_comes_after():
    """Down through 4.0 between steps 20 and 30, up again, and down at the end."""
    bumpy = curve([5, 4.5, 3.5, 4.4, 4.6, 4.2, 3.9, 3.8, 3.7, 3.6])
    assert savings(bumpy, LINE).steps == pytest.approx(1 - 25 / 100)


def test_a_baseline_that_ends_high_is_judged_by_its_end():
    rising = curve([5, 4, 3, 3, 3, 3, 3, 3, 3, 4.5])
    falling = curve(np.linspace(5, 4, 10))
    assert savings(falling, rising).steps == pytest.approx(1 - 55 / 100)


def test_one_that_is_there_at_first_is_given_its_first_validation():
    assert savings(curve(np.full(10, 1.0)), LINE).steps == pytest.approx(0.9)


def test_a_longer_run_that_gets_there_late_is_later():
    late = curve(np.linspace(5, 4, 10), steps=2 * STEPS)
    assert savings(late, LINE).steps == pytest.approx(-1.0)


def test_losses_of_different_text_are_not_compared():
    assert savings(curve(LINE.cross_entropy - 0.2, heldout=501), LINE) == Savings(None, None)


def test_seeds_are_paired_and_spread():
    """Baselines differ by more than any gain: only pairs show it."""
    bases = {seed: curve(LINE.cross_entropy + seed) for seed in range(3)}
    ours = {s: curve(base.cross_entropy - (s + 1) / 10) for s, base in bases.items()}
    over = savings_over_seeds(ours | {7: LINE}, bases)
    assert over.reached == 3 and sorted(over.each) == [0, 1, 2]
    assert over.steps.mean == pytest.approx(0.2) and over.steps.sd == pytest.approx(0.1)


def test_a_mean_never_leaves_out_the_seed_that_never_got_there():
    bases = {seed: LINE for seed in range(2)}
    over = savings_over_seeds(
        {0: curve(LINE.cross_entropy - 0.3), 1: curve(LINE.cross_entropy + 1)}, bases
    )
    assert over.reached == 1 and over.steps is None and over.flops is None
