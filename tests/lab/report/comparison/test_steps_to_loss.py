"""How much sooner a loss is reached, against closed forms."""

import numpy as np
import pytest

from lrkv_jax.lab.report.comparison.runs import Curve, steps_saved, steps_saved_by_seed

STEPS = np.arange(1, 11) * 10.0


def curve(losses, *, steps=STEPS, heldout=500):
    losses, steps = np.asarray(losses, float), np.asarray(steps, float)
    return Curve(steps, 100 * steps, 3 * steps, losses, losses / 3, heldout)


LINE = curve(5.0 - STEPS / 100)  # 4.9 … 4.0


@pytest.mark.parametrize(
    ("ours", "baseline", "saved"),
    [
        (LINE, LINE, 0),
        (curve(LINE.cross_entropy + 0.01), LINE, None),
        # Down through 4.0 between steps 20 and 30, up again, and down at the end.
        (curve([5, 4.5, 3.5, 4.4, 4.6, 4.2, 3.9, 3.8, 3.7, 3.6]), LINE, 1 - 25 / 100),
        (curve(np.linspace(5, 4, 10)), curve([5, 4, 3, 3, 3, 3, 3, 3, 3, 4.5]), 1 - 55 / 100),
        (curve(np.full(10, 1.0)), LINE, 0.9),
        (curve(np.linspace(5, 4, 10), steps=2 * STEPS), LINE, -1),
        (curve(LINE.cross_entropy - 0.2, heldout=501), LINE, None),
    ],
    ids=["equal", "never", "first touch", "judged by its end", "there at first", "later", "text"],
)
def test_what_is_saved_of_a_curve(ours, baseline, saved):
    assert steps_saved(ours, baseline) == (saved if saved is None else pytest.approx(saved))


def test_seeds_are_paired_and_one_that_never_got_there_is_not_left_out():
    """Baselines differ by more than any gain: only pairs show it.

    5 − s/100 − shift = 4 at s = 100·(1 − shift): a shifted line is sooner by the shift itself.
    """
    bases = {seed: curve(LINE.cross_entropy + seed) for seed in range(3)}
    ours = {s: curve(base.cross_entropy - (s + 1) / 10) for s, base in bases.items()}
    saved = steps_saved_by_seed(ours | {1: curve(bases[1].cross_entropy + 1), 7: LINE}, bases)
    assert saved == {0: pytest.approx(0.1), 1: None, 2: pytest.approx(0.3)}
