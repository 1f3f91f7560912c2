"""Differences between variants, with what chance leaves open, from one model of a page's runs.

A value is its variant's plus its seed's plus noise, y_vs = μ_v + β_s + ε: runs of one seed share
the order of their data and every weight that they have in common, so a seed is a block (Box, Hunter
& Hunter, Statistics for Experimenters, chapter 4). Least squares takes all runs together, and their
residuals give one variance with more degrees of freedom than any pair has. Two variants alone are
Student's paired t-test. Where a page compares several, Holm's step-down keeps the chance of any
false difference at the level of one test (Holm 1979, Scand. J. Statist. 6:65).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit  # of Student's t; scipy.stats takes a second

LEVEL = 0.05
POWER = 0.8

# {variant: {seed: value}}; None of a run that ended without one.
Values = Mapping[str, Mapping[int, float | None]]


def mean_and_sd(values: Iterable[Any]) -> tuple[Any, Any]:
    """Mean and sample standard deviation (None of one) over numbers or arrays, one per seed."""
    stacked = np.stack([np.asarray(value, np.float64) for value in values])
    return stacked.mean(0), stacked.std(0, ddof=1) if len(stacked) > 1 else None


@dataclass(frozen=True)
class Contrast:
    """An estimated difference (or slope), its standard error, and the test that it is 0.

    `error` has `degrees` degrees of freedom and is None where the runs leave none; `difference` is
    None where no seed connects the two, and where all runs of one `diverged`. `p` is two-sided,
    adjusted for the `family` of contrasts that this is one of.
    """

    difference: float | None
    error: float | None = None
    degrees: int = 0
    p: float | None = None
    family: int = 1
    diverged: bool = False

    @property
    def differs(self) -> bool:
        return self.p is not None and self.p < LEVEL

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval, of this contrast by itself; None without an error."""
        if self.difference is None or self.error is None:
            return None
        half = -float(stdtrit(self.degrees, LEVEL / 2)) * self.error
        return self.difference - half, self.difference + half

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that such runs would find four times in five.

        At the level that Bonferroni leaves to one of the family; None without an error.
        """
        if self.error is None:
            return None
        found, missed = stdtrit(self.degrees, [LEVEL / 2 / self.family, POWER])
        return float(missed - found) * self.error

    def equal_within(self, margin: float) -> float | None:
        """p of two one-sided tests that |difference| < `margin` (Schuirmann 1987); small: it is."""
        if self.difference is None or self.error is None:
            return None
        if not self.error:
            return float(abs(self.difference) >= margin)
        return float(stdtr(self.degrees, (abs(self.difference) - margin) / self.error))

    @property
    def verdict(self) -> str:
        """lower, higher, not found, or why there is no test."""
        if self.difference is None:
            return "diverged" if self.diverged else "no seed in common"
        if self.p is None:
            return "one seed: cannot tell"
        if not self.differs:
            return "not found"
        return "lower" if self.difference < 0 else "higher"

    @property
    def in_words(self) -> str:
        """The verdict as tables write it: with its p, and with what would have been found."""
        if self.p is None:
            return self.verdict
        p = f"(p = {self.p:.2g})" if self.p >= 0.001 else "(p < 0.001)"
        missed = "" if self.differs else f"; {self.detectable:.2g} would be"
        return f"{self.verdict}{missed} {p}"

    def with_interval(self, digits: int) -> str:
        """The difference and its interval as tables write them: -0.0063 (-0.0112 to -0.0014)."""
        if self.difference is None:
            return ""
        if self.interval is None:
            return f"{self.difference:+.{digits}f}"
        low, high = self.interval
        return f"{self.difference:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def contrasts(values: Values, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Contrast]:
    """First minus second of each pair of variants, all from one model; `p` adjusted by Holm."""
    return combined(values, {(first, second): {first: 1, second: -1} for first, second in pairs})


def combined[K](values: Values, wanted: Mapping[K, Mapping[str, float]]) -> dict[K, Contrast]:
    """Weighted sums of the variants' values, as in {a: 2, b: -1, c: -1}; weights sum to 0.

    All from one model; `p` adjusted by Holm.
    """
    rows = [(v, s, y) for v in values for s, y in values[v].items() if y is not None]
    names = list(dict.fromkeys(v for v, *_ in rows))
    seeds = sorted({s for _, s, _ in rows})
    X = np.zeros((len(rows), len(names) + len(seeds)))
    for row, (v, s, _) in zip(X, rows, strict=True):
        row[names.index(v)] = row[len(names) + seeds.index(s)] = 1
    found = {}
    for key, weights in wanted.items():
        if unknown := set(weights) - set(names):
            diverged = any(values.get(name) for name in unknown)  # there are runs, without a value
            found[key] = Contrast(None, diverged=diverged)
            continue
        c = np.zeros(X.shape[1])
        for name, weight in weights.items():
            c[names.index(name)] += weight
        found[key] = estimate(X, [y for *_, y in rows], c)
    return _adjusted(found)


def against(baseline: Mapping[int, float | None], others: Values) -> dict[str, Contrast]:
    """Each of the others minus the baseline, as `contrasts` of all of them."""
    found = contrasts({"": baseline, **others}, [(name, "") for name in others])
    return {name: one for (name, _), one in found.items()}


def estimate(X: np.ndarray, values: Sequence[float], c: np.ndarray) -> Contrast:
    """c·β of the least-squares fit X β = y, where the rows of X determine it."""
    y = np.asarray(values, np.float64)
    weights = np.linalg.pinv(X.T) @ c  # c·β = weights·y
    if not np.allclose(X.T @ weights, c, atol=1e-9):
        return Contrast(None)
    difference, degrees = float(weights @ y), len(y) - int(np.linalg.matrix_rank(X))
    if degrees < 1:
        return Contrast(difference)
    residual = y - X @ (np.linalg.pinv(X) @ y)
    scale = np.abs(y).max() * len(y) * np.finfo(np.float64).eps  # below it, rounding
    sigma = 0.0 if np.abs(residual).max() <= scale else (residual @ residual / degrees) ** 0.5
    error = float(sigma * np.linalg.norm(weights))
    if error:
        return Contrast(
            difference, error, degrees, float(2 * stdtr(degrees, -abs(difference) / error))
        )
    # The same difference each time: certain, or none at all.
    return Contrast(difference, 0.0, degrees, float(abs(difference) <= scale))


def _adjusted[K](found: dict[K, Contrast]) -> dict[K, Contrast]:
    tested = {key: one.p for key, one in found.items() if one.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {
        key: replace(one, p=adjusted.get(key), family=max(1, len(tested)))
        for key, one in found.items()
    }


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: each smallest one times those not yet passed."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, which in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[which]))
        adjusted[which] = largest
    return adjusted


@dataclass(frozen=True)
class Correlation:
    """Pearson's r² of `n` points, and its 95 % interval; None for fewer than 4 points."""

    r_squared: float
    n: int
    interval: tuple[float, float] | None

    @property
    def in_words(self) -> str:
        """R² with its interval, as pictures write it."""
        if self.interval is None:
            return f"R² = {self.r_squared:.3f} of {self.n} points: too few for an interval"
        low, high = self.interval
        return f"R² = {self.r_squared:.3f} (n = {self.n}; 95 %: {low:.2f} to {high:.2f})"


def correlation(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """Pearson's correlation; None where it is undefined: fewer than 3 points, or one value alone.

    The interval of r is Fisher's (1921, Metron 1:3); that of its square begins at 0
    where r's contains 0.
    """
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    from scipy.stats import pearsonr

    found = pearsonr(x, y)
    r_squared = float(found.statistic) ** 2
    if len(x) < 4:
        return Correlation(r_squared, len(x), None)
    with np.errstate(divide="ignore"):  # points on a line are certain, by this measure
        low, high = map(float, found.confidence_interval(0.95))
    squares = sorted((low**2, high**2))
    return Correlation(r_squared, len(x), (0.0 if low < 0 < high else squares[0], squares[1]))
