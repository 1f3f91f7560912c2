"""How much of a baseline's training a run saves until it reaches the baseline's final loss."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lrkv_jax.lab.report.comparison.contrasts import Spread, spread
from lrkv_jax.lab.report.comparison.runs import Curve


@dataclass(frozen=True)
class Savings:
    """Shares of the baseline's whole training that were not needed; None: never reached.

    `steps` is 1 − step*/step_final and `flops` the same in training FLOPs, which a variant's steps
    do not cost alike. Negative where it took longer than the baseline did.
    """

    steps: float | None
    flops: float | None


def savings(curve: Curve, baseline: Curve) -> Savings:
    """The savings where a run's validation curve first comes down to the baseline's final loss.

    The curve is linear between validations, and counts as reached where it first touches the loss,
    whether it rises again or not. A run that is there at its first validation is given that step:
    it may have been there before. Curves of different held-out text are not compared: never.
    """
    target = baseline.cross_entropy[-1]
    reached = np.flatnonzero(curve.cross_entropy <= target)
    if curve.heldout_tokens != baseline.heldout_tokens or not len(reached):
        return Savings(None, None)
    first = int(reached[0])
    share = 1.0  # of the way from the validation before
    if first:
        above, below = curve.cross_entropy[first - 1 : first + 1]
        share = (above - target) / (above - below)

    def saved(along: np.ndarray, whole: np.ndarray) -> float:
        before = along[max(first - 1, 0)]
        return float(1 - (before + share * (along[first] - before)) / whole[-1])

    return Savings(saved(curve.steps, baseline.steps), saved(curve.flops, baseline.flops))


@dataclass(frozen=True)
class SavingsOverSeeds:
    """`savings` for each seed that both have, and over them.

    `steps` and `flops` are None unless every seed reached its baseline: a mean over those that did
    would leave out the worst ones.
    """

    each: dict[int, Savings]
    steps: Spread | None
    flops: Spread | None

    @property
    def reached(self) -> int:
        """How many seeds came down to their baseline's loss."""
        return sum(one.steps is not None for one in self.each.values())


def savings_over_seeds(
    curves: Mapping[int, Curve], baselines: Mapping[int, Curve]
) -> SavingsOverSeeds:
    """Each seed's curve against the baseline's of the same seed."""
    shared = sorted(curves.keys() & baselines.keys())
    each = {seed: savings(curves[seed], baselines[seed]) for seed in shared}
    if not each or any(one.steps is None for one in each.values()):
        return SavingsOverSeeds(each, None, None)
    found = each.values()
    return SavingsOverSeeds(
        each, spread([one.steps for one in found]), spread([one.flops for one in found])
    )
