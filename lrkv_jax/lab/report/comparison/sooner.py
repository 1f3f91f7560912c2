"""How much sooner one run reaches another's final loss."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lrkv_jax.lab.report.comparison.contrasts import Spread, spread
from lrkv_jax.lab.report.comparison.runs import Curve


@dataclass(frozen=True)
class Sooner:
    """Shares of the baseline's whole training that were not needed; None: never reached.

    `steps` is 1 − step*/step_final and `flops` the same in training FLOPs, which a variant's steps
    do not cost alike. Negative where it took longer than the baseline did.
    """

    steps: float | None
    flops: float | None


NEVER = Sooner(None, None)


def sooner(curve: Curve, baseline: Curve) -> Sooner:
    """Where a run's validation curve first comes down to the baseline's final loss.

    The curve is linear between validations, and counts as reached where it first touches the loss,
    whether it rises again or not. A run that is there at its first validation is given that step:
    it may have been there before. Curves of different held-out text are not compared: never.
    """
    if curve.heldout_tokens != baseline.heldout_tokens:
        return NEVER
    target = baseline.cross_entropy[-1]
    reached = np.flatnonzero(curve.cross_entropy <= target)
    if not len(reached):
        return NEVER
    first = int(reached[0])
    share = 1.0  # of the way from the validation before
    if first:
        above, below = curve.cross_entropy[first - 1 : first + 1]
        share = (above - target) / (above - below)

    def saved(what: str) -> float:
        along = getattr(curve, what)
        before = along[first - 1] if first else along[first]
        at = before + share * (along[first] - before)
        return float(1 - at / getattr(baseline, what)[-1])

    return Sooner(saved("steps"), saved("flops"))


@dataclass(frozen=True)
class SoonerOverSeeds:
    """`sooner` for each seed that both have, and over them.

    `steps` and `flops` are None unless every seed reached its baseline: a mean over those that did
    would leave out the worst ones.
    """

    each: dict[int, Sooner]
    steps: Spread | None
    flops: Spread | None

    @property
    def reached(self) -> int:
        return sum(one.steps is not None for one in self.each.values())


def sooner_over_seeds(
    curves: Mapping[int, Curve], baselines: Mapping[int, Curve]
) -> SoonerOverSeeds:
    """Each seed's curve against the baseline's of the same seed."""
    each = {
        seed: sooner(curves[seed], baselines[seed])
        for seed in sorted(curves.keys() & baselines.keys())
    }
    if not each or any(one.steps is None for one in each.values()):
        return SoonerOverSeeds(each, None, None)
    return SoonerOverSeeds(
        each,
        spread([one.steps for one in each.values()]),
        spread([one.flops for one in each.values()]),
    )
