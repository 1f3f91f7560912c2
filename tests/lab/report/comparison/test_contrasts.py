"""Contrasts, against closed forms, other formulas, and by their rates of error."""

import numpy as np
import pytest
from scipy import stats

from lrkv_jax.lab.report.comparison.contrasts import (
    POWER,
    Contrast,
    against,
    combined,
    contrasts,
    correlation,
    holm,
    mean_and_sd,
)


def pair(ours, theirs) -> Contrast:
    return against(theirs, {"ours": ours})["ours"]


def test_a_worked_example():
    """Differences 1, 2, 3: mean 2, sd 1, t = 2·√3 with 2 degrees, p = 1 − √12/√14."""
    one = pair({0: 11, 1: 22, 2: 33, 9: 0}, {0: 10, 1: 20, 2: 30})
    assert (one.difference, one.error) == pytest.approx((2, 3**-0.5))
    assert one.p == pytest.approx(1 - (12 / 14) ** 0.5, rel=1e-8)
    assert one.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert one.in_words == "not found; 3.1 would be (p = 0.074)"
    assert one.with_interval(2) == "+2.00 (-0.48 to +4.48)"
    assert mean_and_sd([2.0])[1] is None and mean_and_sd([1.0, 3.0])[1] == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    "ours, said",
    [
        ({7: 0.5}, "no seed in common"),
        ({0: None, 1: None}, "diverged"),
        ({}, "no seed in common"),
        ({0: 0.5}, "one seed: cannot tell"),
        ({0: 0.9, 1: 1.9, 2: 2.9001}, "lower"),
        ({0: 1.1, 1: 2.1, 2: 3.1001}, "higher"),
        ({0: 0.5, 1: 2.5, 2: 3.0}, "not found"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, "not found"),  # the same each time
        ({0: 0.5, 1: 1.5, 2: 2.5}, "lower"),  # by as much each time
    ],
)
def test_verdicts(ours, said):
    assert pair(ours, {0: 1.0, 1: 2.0, 2: 3.0}).verdict == said


def test_several_variants_share_one_variance():
    """A complete block design: 4 variants, 5 seeds; its error is √(2 MSE / seeds)."""
    values = np.random.default_rng(1).normal(size=(4, 5))
    residual = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    mse = (residual**2).sum() / 12
    named = {name: dict(enumerate(row)) for name, row in zip("abcd", values, strict=True)}
    pairs = [("a", "b"), ("c", "a")]
    # A difference of differences, (a − b) − (b − c), has the variance of all its terms.
    [found] = combined(named, {"both": {"a": 1, "b": -2, "c": 1}}).values()
    a, b, c, _ = values.mean(1)
    assert (found.difference, found.error) == pytest.approx((a - 2 * b + c, (6 * mse / 5) ** 0.5))
    assert found.degrees == 12 and found.family == 1
    assert combined(named, {"": {"a": 1, "e": -1}})[""].difference is None
    found = contrasts(named, pairs)
    raw = []
    for (first, second), one in found.items():
        over = values["abcd".index(first)].mean() - values["abcd".index(second)].mean()
        assert (one.difference, one.error) == pytest.approx((over, (2 * mse / 5) ** 0.5))
        assert one.degrees == 12 and one.family == 2
        raw.append(2 * stats.t.sf(abs(over) / one.error, 12))
    assert [one.p for one in found.values()] == pytest.approx(holm(raw))
    # A seed that one variant lacks still tells of the others; a variant of another seed does not.
    named["a"][0] = None
    assert contrasts(named, pairs)["a", "b"].degrees == 11
    assert contrasts({**named, "e": {9: 1.0}}, [("e", "a")])["e", "a"].difference is None


def test_holm_s_own_example():
    """Sorted p times m, m − 1, …, never below one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.slow
def test_rates_of_error_and_of_discovery_are_as_said():
    """Four variants against MHA, 4 seeds, 400 times, with no difference and with one that shows."""
    rng = np.random.default_rng(0)

    def found(effect):
        shared = rng.normal(0, 1.0, 4)  # what a seed does to all variants alike
        noise = rng.normal(0, 0.01, (5, 4))
        noise[1] += effect
        named = {str(k): dict(enumerate(shared + row)) for k, row in enumerate(noise)}
        return list(against(named.pop("0"), named).values())

    def share(events, expected):
        rate = np.mean(list(events))
        assert abs(rate - expected) < 3 * (expected * (1 - expected) / 400) ** 0.5, rate

    same = [found(0.0) for _ in range(400)]
    assert np.mean([any(one.differs for one in four) for four in same]) < 0.05 + 0.033
    share((low <= 0 <= high for low, high in (four[0].interval for four in same)), 0.95)
    # The smallest difference that is found four times in five, at the known error of the noise.
    error = (2 * 0.01**2 / 4) ** 0.5
    smallest = Contrast(0.0, error, 12, 1.0, family=4).detectable
    level = 0.05 / 4  # Holm finds a little more than Bonferroni
    share((2 * stats.t.sf(abs(four[0].difference) / four[0].error, 12) < level
           for four in (found(smallest) for _ in range(400))), POWER)  # fmt: skip
    # At the margin, "equal within" is wrong one time in twenty; far below it, it is found.
    share((four[0].equal_within(0.02) < 0.05 for four in (found(0.02) for _ in range(400))), 0.05)
    assert np.mean([four[0].equal_within(0.05) < 0.05 for four in same]) > 0.9


def test_r_squared_is_the_share_that_least_squares_explains_and_its_interval_fisher_s():
    rng = np.random.default_rng(0)
    x = rng.normal(size=9)
    y = 0.5 * x + rng.normal(size=9)
    left = y - np.polyval(np.polyfit(x, y, 1), x)
    assert correlation(x, y).r_squared == pytest.approx(1 - left.var() / y.var())
    # r = 1/2 exactly; artanh 1/2 = ln(3)/2, and tanh z = (e^2z − 1)/(e^2z + 1).
    one = correlation([1, -1, 0, 0, 0], [1, 0, -1, 0, 0])
    assert one.r_squared == pytest.approx(0.25)
    top = 3 * np.exp(2 * 1.959964 / 2**0.5)
    # r's own interval holds 0, and so does its square's.
    assert one.interval == pytest.approx((0.0, ((top - 1) / (top + 1)) ** 2), abs=1e-6)
    assert correlation([1, 2, 3], [1, 2, 4]).interval is None
    assert correlation([1, 2], [3, 4]) is correlation([1, 1, 1], [1, 2, 3]) is None
