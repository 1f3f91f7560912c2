"""How well one figure of some models predicts another, and how wide the interval of that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Correlation:
    """Pearson's `r` of `n` points, its square, and the square's 95 % interval.

    The interval is None for fewer than 4 points: Fisher's z has none then.
    """

    r: float
    n: int
    interval: tuple[float, float] | None

    @property
    def r_squared(self) -> float:
        return self.r**2

    @property
    def in_words(self) -> str:
        """R² with its interval, as pictures write it."""
        if self.interval is None:
            return f"R² = {self.r_squared:.3f} of {self.n} points: too few for an interval"
        low, high = self.interval
        return f"R² = {self.r_squared:.3f} (n = {self.n}; 95 %: {low:.2f} to {high:.2f})"


def correlation(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """Pearson's correlation; None where it is undefined: fewer than 3 points, or one value alone.

    The interval of r is Fisher's (1921, Metron 1:3); that of its square begins at 0 where r's
    contains 0.
    """
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    found = stats.pearsonr(a, b)
    r = float(found.statistic)
    if len(x) < 4:
        return Correlation(r, len(x), None)
    with np.errstate(divide="ignore"):  # points on a line are certain, by this measure
        low, high = map(float, found.confidence_interval(0.95))
    squares = sorted((low**2, high**2))
    return Correlation(r, len(x), (0.0 if low < 0 < high else squares[0], squares[1]))
