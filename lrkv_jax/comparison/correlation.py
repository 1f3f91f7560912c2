"""How well one figure of some models tells another, and how little a handful of models says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054  # the normal's 97.5th percentile


@dataclass(frozen=True)
class Correlation:
    """Pearson's `r` of `n` points, its square, and the square's 95 % interval.

    The interval is None of fewer than 4 points: Fisher's z has none then.
    """

    r: float
    n: int
    interval: tuple[float, float] | None

    @property
    def r_squared(self) -> float:
        return self.r**2

    @property
    def in_words(self) -> str:
        """As a picture has it."""
        if self.interval is None:
            return f"R² = {self.r_squared:.3f} of {self.n} points: too few for an interval"
        low, high = self.interval
        return f"R² = {self.r_squared:.3f} (n = {self.n}; 95 %: {low:.2f} to {high:.2f})"


def correlation(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """Pearson's correlation; None where it is undefined: fewer than 3 points, or one value alone.

    The interval of r is tanh(artanh r ± 1.96/√(n − 3)) (Fisher 1921, Metron 1:3); that of its
    square begins at 0 where r's holds 0.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    r = float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1, 1))
    if len(x) < 4:
        return Correlation(r, len(x), None)
    with np.errstate(divide="ignore"):  # of points on a line: certain, by this measure
        z, half = np.arctanh(r), Z_95 / np.sqrt(len(x) - 3)
    low, high = np.tanh(z - half), np.tanh(z + half)
    squares = sorted((float(low**2), float(high**2)))
    return Correlation(r, len(x), (0.0 if low < 0 < high else squares[0], squares[1]))
