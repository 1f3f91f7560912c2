"""The paired test, against printed tables of Student's t, and by its rates of error."""

import numpy as np
import pytest

from lrkv_jax.comparison import Paired, against, paired, spread
from lrkv_jax.comparison.paired import holm

# Critical values of Student's t, two-sided, as books print them (NIST handbook 1.3.6.7.2).
TABLE = [
    (12.706, 1, 0.05), (63.657, 1, 0.01), (4.303, 2, 0.05), (9.925, 2, 0.01), (3.182, 3, 0.05),
    (2.776, 4, 0.05), (2.228, 10, 0.05), (2.042, 30, 0.05), (3.646, 30, 0.001), (1.984, 100, 0.05),
]  # fmt: skip


@pytest.mark.parametrize("t, degrees, p", TABLE)
def test_p_is_the_printed_table_s(t, degrees, p):
    spread_out = np.arange(degrees + 1) - degrees / 2
    differences = spread_out / spread_out.std(ddof=1) + t / (degrees + 1) ** 0.5
    for sign in (1, -1):
        result = paired(dict(enumerate(sign * differences)), dict.fromkeys(range(degrees + 1), 0.0))
        assert (result.t, result.p) == pytest.approx((sign * t, p), rel=1.5e-3)


def test_a_worked_example():
    """Differences 1, 2, 3: mean 2, sd 1, t = 2·√3 with 2 degrees, p = 1 − √12/√14."""
    result = paired({0: 11, 1: 22, 2: 33, 9: 0}, {0: 10, 1: 20, 2: 30})
    assert (result.difference, result.sd, result.n) == (2, 1, 3)
    assert result.t == pytest.approx(2 * 3**0.5)
    assert result.p == pytest.approx(1 - (12 / 14) ** 0.5, rel=1e-8)
    assert result.verdict == "none"


@pytest.mark.parametrize(
    "ours, said",
    [
        ({}, "no seed in common"),
        ({0: 0.5}, "one seed: cannot tell"),
        ({0: 0.9, 1: 1.9, 2: 2.9001}, "lower"),
        ({0: 1.1, 1: 2.1, 2: 3.1001}, "higher"),
        ({0: 0.5, 1: 2.5, 2: 3.0}, "none"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, "none"),  # the same each time
        ({0: 0.5, 1: 1.5, 2: 2.5}, "lower"),  # by as much each time
    ],
)
def test_verdicts(ours, said):
    assert paired(ours, {0: 1.0, 1: 2.0, 2: 3.0}).verdict == said


def test_one_value_has_no_spread():
    assert spread([2.0]).sd is None and spread([1.0, 3.0]).sd == pytest.approx(2**0.5)


def test_holm_s_own_example():
    """Sorted p times m, m − 1, …, never below one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_a_variant_without_a_pair_does_not_count_as_a_test():
    base = {0: 1.0, 1: 2.0, 2: 3.0}
    near = {0: 0.9, 1: 1.91, 2: 2.905}
    alone = against(base, {"a": near})["a"].p
    both = against(base, {"a": near, "b": {0: 5.0}})
    assert both["a"].p == alone and both["b"] == Paired(4.0, None, 1, None, None)


def test_false_differences_are_as_rare_as_said_and_true_ones_are_found():
    """Four variants that are MHA, 3 seeds, 300 times: at most 5 % of times does one differ."""
    rng = np.random.default_rng(0)

    def differ(effect):
        shared = rng.normal(0, 1.0, 3)  # what a seed does to all variants alike
        noise = rng.normal(0, 0.01, (5, 3))
        base = dict(enumerate(shared + noise[0]))
        others = {str(k): dict(enumerate(shared + noise[k] - effect)) for k in range(1, 5)}
        return [one.differs for one in against(base, others).values()]

    wrong = np.mean([any(differ(0.0)) for _ in range(300)])
    assert wrong < 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5
    assert np.mean([differ(0.2) for _ in range(50)]) > 0.8
    # Unpaired, the spread between seeds would hide it: it is five times the effect.
