"""Means and spreads of nested dicts of numbers, leaf by leaf; None where one of them is None."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def mean(dicts: Sequence[dict[str, Any]]) -> Any:
    """Mean of each number."""
    return _leafwise(np.mean, dicts)


def deviation(dicts: Sequence[dict[str, Any]]) -> Any:
    """Standard deviation of each number, of a sample (n − 1); None for one."""
    return _leafwise(lambda values: np.std(values, ddof=1) if len(values) > 1 else None, dicts)


def _leafwise(reduce, dicts):
    def one(*values):
        found = None if None in values else reduce(values)
        return None if found is None else float(found)

    return jax.tree.map(one, *dicts, is_leaf=lambda leaf: leaf is None)
