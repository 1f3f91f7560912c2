"""Means over seeds, and whether two variants differ by more than their noise.

Runs of one seed share data order and the seed of their weights, so they are compared seed by seed:
Student's paired t-test. Where several variants are compared with one, Holm's step-down keeps the
chance of any false difference at the level of one test (Holm 1979, Scand. J. Statist. 6:65).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None of one value) and number of values."""

    mean: float
    sd: float | None
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and spread of one value or more."""
    given = np.asarray(values, np.float64)
    sd = float(given.std(ddof=1)) if len(given) > 1 else None
    return Spread(float(given.mean()), sd, len(given))


@dataclass(frozen=True)
class Paired:
    """A difference over paired values: its mean, its own spread, and the test that it is 0.

    `p` is two-sided, adjusted where the difference is one of several; None of fewer than 2 pairs.
    """

    difference: float | None
    sd: float | None
    n: int
    t: float | None
    p: float | None

    @property
    def differs(self) -> bool:
        return self.p is not None and self.p < LEVEL

    @property
    def interval(self) -> tuple[float, float] | None:
        """The difference's own 95 % interval, not adjusted for others; None of fewer than 2."""
        if self.sd is None:
            return None
        half = float(stats.t.isf(LEVEL / 2, self.n - 1)) * self.sd / self.n**0.5
        return self.difference - half, self.difference + half

    @property
    def verdict(self) -> str:
        """lower, higher, none, or why there is no test."""
        if self.n == 0:
            return "no seed in common"
        if self.p is None:
            return "one seed: cannot tell"
        if not self.differs:
            return "none"
        return "lower" if self.difference < 0 else "higher"

    @property
    def in_words(self) -> str:
        """The verdict with its p, as tables write it."""
        return self.verdict if self.p is None else f"{self.verdict} (p = {self.p:.2g})"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Ours minus theirs over the seeds that both have; two-sided Student's t with n − 1 degrees."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return Paired(None, None, 0, None, None)
    over = spread([ours[seed] - theirs[seed] for seed in seeds])
    if over.sd is None:
        return Paired(over.mean, None, 1, None, None)
    if over.sd == 0:  # the same difference each time: certain, or none at all
        t = float(np.copysign(np.inf, over.mean)) if over.mean else 0.0
        return Paired(over.mean, 0.0, over.n, t, 0.0 if over.mean else 1.0)
    test = stats.ttest_rel(*([side[seed] for seed in seeds] for side in (ours, theirs)))
    return Paired(over.mean, over.sd, over.n, float(test.statistic), float(test.pvalue))


def against(
    baseline: Mapping[int, float], others: Mapping[str, Mapping[int, float]]
) -> dict[str, Paired]:
    """Each of the others minus the baseline, with `p` adjusted for their number by Holm."""
    results = {name: paired(values, baseline) for name, values in others.items()}
    tested = {name: one.p for name, one in results.items() if one.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {name: replace(one, p=adjusted.get(name)) for name, one in results.items()}


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: each smallest one times those not yet passed."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, which in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[which]))
        adjusted[which] = largest
    return adjusted
