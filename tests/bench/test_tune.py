"""Candidates of a plan vary one axis, fit, and attend to the same shapes."""

import pytest

from lrkv_jax.bench import tune
from lrkv_jax.kernels.split_kv import plan as plans
from lrkv_jax.kernels.split_kv import tuned

FULL = {"H": 18, "G": 1, "T": 1, "key_widths": (128,), "value_width": 128, "rank": 56,
        "full": True, "norm_heads": 1}  # fmt: skip
MHA = {"H": 6, "G": 6, "T": 1, "key_widths": (128,), "value_width": 128}
MAY_CHANGE = {
    "heads": {"heads", "warpgroups", "ring", "head_ring", "ctas", "workers"},
    "rings": {"ring", "head_ring"},
    "ctas": {"ctas", "ring", "head_ring", "workers"},
    "workers": {"workers"},
}


@pytest.mark.parametrize("axis", tune.AXES)
@pytest.mark.parametrize("shape", [FULL, MHA], ids=["lrkv-full", "mha"])
def test_candidates_vary_their_axis_fit_and_keep_the_family(shape, axis, monkeypatch):
    first = plans.make_plan(**shape)
    monkeypatch.setattr(tune, "computed", lambda shape: first)
    start = tuned.chosen(first)
    found = tune.candidates(None, axis, None)
    for choice in found:
        plan = tuned.with_choice(first, choice)  # raises for one that does not fit
        assert tuned.family(plan) == tuned.family(first)
        assert {k for k in choice if choice[k] != start[k]} <= MAY_CHANGE[axis] and choice != start
    # MHA's head has nobody to share a CTA with, and only its small CTAs fit twice.
    none = {(FULL["H"], "ctas"), (MHA["H"], "heads")}
    assert bool(found) == ((shape["H"], axis) not in none)
    # From another start, its own fields are what does not vary.
    for choice in found[:1]:
        for again in tune.candidates(None, "workers", choice):
            assert {**again, "workers": 0} == {**choice, "workers": 0}
