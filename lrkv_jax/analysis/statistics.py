"""Means and spreads of nested dicts of numbers, leaf by leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def leafwise(reduce: Callable[[list[float]], Any], dicts: Sequence[dict[str, Any]]) -> Any:
    """`reduce` of each number of dicts of one shape; None where one of them is None."""
    first = dicts[0]
    if isinstance(first, dict):
        return {name: leafwise(reduce, [each[name] for each in dicts]) for name in first}
    return None if any(each is None for each in dicts) else reduce(list(dicts))


def mean(dicts: Sequence[dict[str, Any]]) -> Any:
    """Mean of each number."""
    return leafwise(lambda values: float(np.mean(values)), dicts)


def deviation(dicts: Sequence[dict[str, Any]]) -> Any:
    """Standard deviation of each number, of a sample (n − 1); None for one."""
    if len(dicts) < 2:
        return leafwise(lambda values: None, dicts)
    return leafwise(lambda values: float(np.std(values, ddof=1)), dicts)
