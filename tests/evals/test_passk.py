"""pass@k is the share of k-sets that hold a passing program: against counting them all."""

import math
from itertools import combinations

import pytest

from lrkv_jax.errors import LrkvError
from lrkv_jax.evals.passk import pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_it_equals_the_share_of_all_draws_that_hold_a_pass(n):
    for c in range(n + 1):
        passed = [i < c for i in range(n)]
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(passed, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_many_samples_neither_overflow_nor_lose_digits():
    n, c, k = 20_000, 37, 1_000
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("n, c, k", [(1, 0, 2), (0, 0, 1), (5, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_what_cannot_be_is_refused(n, c, k):
    with pytest.raises(LrkvError, match="pass@"):
        pass_at_k(n, c, k)
