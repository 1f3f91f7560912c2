"""Diversity of heads against forms that are really made, and against cases known in closed form."""

from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.variants import FIVE, small

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.analysis.activations import weighted
from lrkv_jax.lab.analysis.diversity import FORMS, centered, diversity, gram, null
from lrkv_jax.lab.analysis.heads import random_heads


def drawn(H, D, W, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((H, D, W)), rng.standard_normal((H, D, W))


def forms(left_HDW, right_HDW):
    return np.einsum("HDW,HEW->HDE", left_HDW, right_HDW)


def orthogonal(H, D, W):
    """Heads that read coordinates of their own: their forms are orthogonal."""
    left, right = drawn(H, D, W)
    reads = np.kron(np.eye(H), np.ones(D // H)).reshape(H, D, 1)
    return left * reads, right


def test_centring_is_that_of_the_forms_themselves():
    left, right = drawn(5, 10, 3)
    flat = forms(left, right).reshape(5, -1)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    flat -= flat.mean(axis=0)
    values = np.linalg.svd(flat, compute_uv=False) ** 2
    found = diversity(left, right)
    np.testing.assert_allclose(centered(found.gram_HH), flat @ flat.T, atol=1e-13)
    np.testing.assert_allclose(found.centred.values_H, values, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(1, 11), st.integers(4, 9), st.integers(0, 99))
def test_no_heads_pass_a_cap(H, W, D, seed):
    left, right = drawn(H, D, W, seed)
    flat = forms(left, right).reshape(H, -1)
    np.testing.assert_allclose(gram(left, right), flat @ flat.T, rtol=1e-11, atol=1e-11)
    found = diversity(left, right + right[:1])
    for curve in (found.uncentred, found.centred):
        assert 0 < curve.effective_rank <= curve.cap + 1e-9
        assert np.all(np.diff(curve.values_H) <= 0) and np.all(curve.values_H >= 0)
        assert curve.cumulative_H[-1] == pytest.approx(1)
        assert 1 <= curve.components(0.9) <= curve.cap
    assert found.centred.values_H[-1] == 0


@pytest.mark.parametrize("H", [2, 6])
def test_identical_heads_have_rank_one_and_orthogonal_ones_reach_both_caps(H):
    found = diversity(*(np.repeat(factor, H, axis=0) for factor in drawn(1, 40, 8)))
    assert found.uncentred.effective_rank == pytest.approx(1, abs=1e-12)
    assert found.uncentred.components() == 1
    assert found.mean_off_diagonal == pytest.approx(1, abs=1e-14)
    assert found.centred.effective_rank == 0 and found.centred.components() == 0
    assert found.centred.total == 0 and not found.centred.cumulative_H.any()
    found = diversity(*orthogonal(H, 4 * H, 3))
    assert found.mean_off_diagonal == pytest.approx(0, abs=1e-15)
    for curve, cap in ((found.uncentred, H), (found.centred, H - 1)):
        assert curve.cap == cap
        assert curve.effective_rank == pytest.approx(cap, abs=1e-10)
        assert curve.percent_of_cap == pytest.approx(100, abs=1e-9)
        assert curve.percent_of_heads == pytest.approx(100 * cap / H, abs=1e-9)
        np.testing.assert_allclose(curve.values_H[:cap], 1, atol=1e-12)
        assert curve.components(0.9) == int(np.ceil(0.9 * cap - 1e-9))


def test_groups_zeros_and_a_single_head_are_counted_as_they_are():
    """Two groups of equal heads, GQA's extreme: shares 4/6 and 2/6, so exp(entropy) is known."""
    left, right = orthogonal(2, 8, 3)
    found = diversity(np.repeat(left, [4, 2], axis=0), np.repeat(right, [4, 2], axis=0))
    shares = np.array([4, 2]) / 6
    rank = np.exp(-(shares * np.log(shares)).sum())
    assert found.uncentred.effective_rank == pytest.approx(rank)
    assert found.uncentred.components(0.6) == 1 and found.uncentred.components(0.7) == 2
    assert found.centred.effective_rank == pytest.approx(1)
    left, right = orthogonal(4, 8, 2)
    right[2] = 0  # which takes no part
    found = diversity(left, right)
    assert not found.gram_HH[2].any()
    assert found.uncentred.effective_rank == pytest.approx(3)
    assert diversity(left, 0 * right).uncentred.effective_rank == 0
    assert diversity(*drawn(1, 5, 2)).centred.percent_of_cap is None


@pytest.mark.slow  # two wide layers
def test_the_null_is_near_its_caps_at_width_for_mha_and_mqa_alike():
    """Why the paper's gaps say little: at D = 192 random MQA is as diverse as random MHA."""
    for name in ("mha", "mqa"):
        at = null(random_heads(small(FIVE[name], width=192, head_width=32), 1), 1)
        at = at["query_key"]["mean"]
        for curve in ("uncentred", "centred"):
            assert at[curve]["percent_of_cap"] > 99.8


def test_a_null_of_no_layer_is_refused_and_one_of_one_has_no_spread():
    config = small(FIVE["mqa"])
    with pytest.raises(LrkvError, match="null_seeds = 0"):
        next(random_heads(config, 0))
    one = null(random_heads(config, 1), 2)["query_key"]
    assert one["sd"]["centred"]["percent_of_cap"] is None
    assert one["sd_of_mean"]["mean_off_diagonal"] is None


def test_the_spread_of_a_null_is_that_of_weights_and_not_of_inputs():
    """Of a mean over two layers, whose inputs differ, as rounds of draws have it."""
    config, rounds = small(FIVE["mha"]), 100
    roots = [np.diag(np.exp(-slope * np.arange(config.width))) for slope in (0, 0.8)]
    layers = list(map(weighted, random_heads(config, 2 * rounds), cycle(roots)))
    found = null(layers, 2, 2)["query_key"]["sd_of_mean"]["centred"]["percent_of_cap"]
    of_layers = [
        diversity(*FORMS["query_key"](heads)).as_dict()["centred"]["percent_of_cap"]
        for heads in layers
    ]
    of_rounds = np.reshape(of_layers, (rounds, 2))
    assert found == pytest.approx(of_rounds.mean(axis=1).std(ddof=1), rel=0.2)
    assert np.std(of_layers) / 2**0.5 > 1.5 * found, "as it was with the inputs' differences"
