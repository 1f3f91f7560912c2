"""How much of a baseline's training a run saves until it reaches the baseline's final loss."""

from collections.abc import Mapping

import numpy as np

from lrkv_jax.lab.report.comparison.runs import Curve


def steps_saved(curve: Curve, baseline: Curve) -> float | None:
    """1 − step*/step_final: the share of the baseline's steps that were not needed.

    At step* the run's validation curve first comes down to the baseline's final loss. The curve is
    linear between validations, and counts as reached where it first touches the loss, whether it
    rises again or not. A run that is there at its first validation is given that step: it may have
    been there before. Negative where it took longer than the baseline did. None where it never got
    there, and for curves of different held-out text, which are not compared.
    """
    target = baseline.cross_entropy[-1]
    reached = np.flatnonzero(curve.cross_entropy <= target)
    if curve.heldout_tokens != baseline.heldout_tokens or not len(reached):
        return None
    first = int(reached[0])
    step = curve.steps[first]
    if first:
        above, below = curve.cross_entropy[first - 1 : first + 1]
        share = (above - target) / (above - below)  # of the way from the validation before
        step = curve.steps[first - 1] + share * (step - curve.steps[first - 1])
    return float(1 - step / baseline.steps[-1])


def steps_saved_by_seed(
    curves: Mapping[int, Curve], baselines: Mapping[int, Curve]
) -> dict[int, float | None]:
    """Each seed's curve against the baseline's of the same seed, of the seeds that both have.

    A mean over those that got there would leave out the worst ones: there is none with a None.
    """
    shared = sorted(curves.keys() & baselines.keys())
    return {seed: steps_saved(curves[seed], baselines[seed]) for seed in shared}
