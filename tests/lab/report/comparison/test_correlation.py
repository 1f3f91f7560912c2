"""Correlation: closed forms, and intervals as wide as few points make them."""

import numpy as np
import pytest

from lrkv_jax.lab.report.comparison import correlation


def test_points_on_a_line_are_certain():
    one = correlation([1, 2, 3, 4], [8, 6, 4, 2])
    assert (one.r_squared, one.interval) == (1.0, (1.0, 1.0))


def test_r_squared_is_the_share_of_variance_that_least_squares_explains():
    rng = np.random.default_rng(0)
    x = rng.normal(size=9)
    y = 0.5 * x + rng.normal(size=9)
    left = y - np.polyval(np.polyfit(x, y, 1), x)
    one = correlation(x, y)
    assert one.r_squared == pytest.approx(1 - (left @ left) / ((y - y.mean()) @ (y - y.mean())))
    assert one.r_squared == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)


def test_the_interval_is_fisher_s():
    # r = 1/2 exactly; artanh 1/2 = ln(3)/2, and tanh z = (e^2z − 1)/(e^2z + 1).
    one = correlation([1, -1, 0, 0, 0], [1, 0, -1, 0, 0])
    assert one.r_squared == pytest.approx(0.25)
    top = 3 * np.exp(2 * 1.959964 / 2**0.5)
    # r's own interval holds 0, and so does its square's.
    assert one.interval == pytest.approx((0.0, ((top - 1) / (top + 1)) ** 2), abs=1e-6)


def test_95_of_100_intervals_hold_the_truth():
    rng, true, hits = np.random.default_rng(1), 0.8, 0
    for _ in range(400):
        x, e = rng.normal(size=(2, 12))
        low, high = correlation(x, true * x + (1 - true**2) ** 0.5 * e).interval
        hits += low <= true**2 <= high
    assert 0.92 < hits / 400 < 0.98


@pytest.mark.parametrize(("x", "y"), [([1, 2], [3, 4]), ([1, 1, 1], [1, 2, 3])])
def test_what_has_no_correlation_has_none(x, y):
    assert correlation(x, y) is None


def test_three_points_have_no_interval():
    assert correlation([1, 2, 3], [1, 2, 4]).interval is None
