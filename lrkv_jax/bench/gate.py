"""Correctness before speed: an implementation that differs from the float32 oracle is not timed.

The compiled program that will be timed is the one that is checked, at its full shape. The oracle
builds every key and value of every head, so it runs for the shortest and the longest sequence
alone, and, where even one would not fit, over the first slots only: lengths are arguments, so the
program is checked there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.bench.problems import Problem, with_oracle

# Float32 values of one sequence's keys, over all heads, that the oracle may build.
ORACLE_VALUES = 1 << 28

# Largest difference over the largest output. bfloat16: queries, weights and factors are rounded to
# 2⁻⁹ each. float32 on a GPU: XLA multiplies in TF32, 2⁻¹¹. Rotating by a position in two steps or
# in one differs by the rounding of float32 angles, which grows with the position.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
TOLERANCE_TF32 = 5e-3
ANGLES_EXACT_TO = 16384


@dataclass(frozen=True)
class Truth:
    """The oracle's answer for some rows of a problem, at the lengths that were checked."""

    rows: list[int]
    lengths_B: np.ndarray
    out: np.ndarray
    lse: np.ndarray

    @property
    def says(self) -> str:
        """What was checked, for the report."""
        return f"sequences of {' and '.join(str(self.lengths_B[row]) for row in self.rows)} tokens"


def tolerance(dtype: str, length: int) -> float:
    """The allowed difference, relative to the largest output."""
    tf32 = dtype == "float32" and jax.default_backend() != "cpu"
    allowed = TOLERANCE_TF32 if tf32 else TOLERANCE[dtype]
    return max(allowed, TOLERANCE["float32"] * length / ANGLES_EXACT_TO)


def truth_of(problem: Problem) -> Truth:
    """Run the oracle on the shortest and the longest sequence of a problem."""
    lengths_B = np.asarray(problem.lengths_B)
    model = problem.model
    slots = min(int(lengths_B.max()), max(1, ORACLE_VALUES // (model.heads * model.head_width)))
    rows = sorted({int(lengths_B.argmin()), len(lengths_B) - 1 - int(lengths_B[::-1].argmax())})
    checked_B = np.minimum(lengths_B, slots)

    @jax.jit
    def oracle(queries, factors, cache, lengths_B, row):
        one = _row(queries, factors, cache, row, slots)
        length_B = jax.lax.dynamic_slice_in_dim(lengths_B, row, 1)
        return with_oracle(problem, *one, length_B)

    arrays = (problem.queries, problem.factors, problem.cache, jnp.asarray(checked_B))
    answers = [oracle(*arrays, row) for row in rows]
    out, lse = (np.concatenate([np.asarray(a[i]) for a in answers]) for i in (0, 1))
    return Truth(rows, checked_B, out, lse)


def _row(queries, factors, cache, row, slots: int) -> tuple[Any, Any, Any]:
    """Queries, factors and the first slots of the cache of one sequence."""
    slots_last = getattr(cache, "SLOTS_LAST", ())

    def cut(name: str, leaf):
        if leaf is None:
            return None
        one = jax.lax.dynamic_slice_in_dim(leaf, row, 1)
        return one[:, :, :slots] if name in slots_last else one[:, :slots]

    one = type(cache)(**{name: cut(name, leaf) for name, leaf in vars(cache).items()})
    query = {name: jax.lax.dynamic_slice_in_dim(a, row, 1) for name, a in queries.items()}
    factors = {name: a[:slots] if name == "angles_SK" else a for name, a in factors.items()}
    return query, factors, one


def error(truth: Truth, out, lse) -> float:
    """Largest difference from the oracle over its largest output; NaN counts as infinite.

    The log-sum-exp, where there is one, is of order 1 to 10 and compared as it is.
    """
    got = np.asarray(out, np.float32)[truth.rows]
    worst = np.abs(got - truth.out).max() / np.abs(truth.out).max()
    if lse is not None:
        worst = max(worst, np.abs(np.asarray(lse, np.float32)[truth.rows] - truth.lse).max())
    return float(worst) if np.isfinite(worst) else float("inf")
