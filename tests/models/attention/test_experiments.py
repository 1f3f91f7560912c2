"""Variants of experiments/: each decodes as it is trained, and is LRKV at its limit."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.variants import HEAD_WIDTH, HEADS, WIDTH, error, random_model, small

from lrkv_jax.config.attention import variant_class
from lrkv_jax.models.attention import LRKV
from lrkv_jax.models.weights import join
from lrkv_jax.optim.muon import scale_by_muon

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
ONE_TABLE = "controls:OneTable"


@pytest.fixture(scope="module", autouse=True)
def experiments():
    """Their modules, on the path and out of memory again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("mechanism", "controls"):
            sys.modules.pop(name)


def per_head(**how):
    return variant_class("mechanism.variants:PerHead")(**how)


def layer_of(attention):
    return random_model(small(attention, layers=1)).blocks[0].attention


@jax.jit
def forward(layer, x_BTD):
    return layer(x_BTD, jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), x_BTD.shape[:2]))


@jax.jit
def decoded(layer, x_BTD):
    """The last three tokens' outputs from the cache."""
    B, T, _ = x_BTD.shape
    cache = layer.decode(x_BTD[:, :-3], layer.init_cache(B, T, jnp.float32), jnp.zeros(B, int))[1]
    return layer.decode(x_BTD[:, -3:], cache, jnp.full(B, T - 3))[0]


X_BTD = np.float32(np.random.default_rng(0).standard_normal((2, 12, WIDTH)))


@pytest.mark.parametrize(
    "attention",
    [
        per_head,
        pytest.param(lambda: per_head(factored=True), marks=pytest.mark.slow),
        pytest.param(lambda: per_head(rate=2.0), marks=pytest.mark.slow),
        pytest.param(lambda: variant_class("controls:WideMHA")(more=4), marks=pytest.mark.slow),
        pytest.param(
            lambda: variant_class(ONE_TABLE)(rank=3, rope="latent"), marks=pytest.mark.slow
        ),
    ],
)
def test_each_decodes_what_its_forward_says(attention):
    layer = layer_of(attention())
    whole_BTD = forward(layer, X_BTD)
    join(layer)  # as an engine does
    assert error(decoded(layer, X_BTD), whole_BTD[:, -3:]) <= 1e-5


@pytest.mark.slow
def test_latents_of_one_table_are_lrkv_s_where_they_are_as_wide_as_heads():
    kinds = variant_class(ONE_TABLE), LRKV
    for rank, same in ((HEAD_WIDTH, True), (4, False)):
        ours, theirs = (layer_of(kind(rank=rank, rope="latent")) for kind in kinds)
        assert (error(forward(ours, X_BTD), forward(theirs, X_BTD)) < 1e-6) == same


def test_both_of_the_factorial_is_lrkv_of_rank_k():
    """The same weights give the same outputs, and both start at the same sizes."""
    lrkv = layer_of(LRKV(rank=HEAD_WIDTH, rope="full"))
    both = layer_of(per_head(shared=True, factored=True))
    both.query, both.output = lrkv.query, lrkv.output
    for name in ("key", "value"):
        setattr(both, f"{name}_shared", getattr(lrkv, name))
        for part in ("down", "up"):
            ours, theirs = (getattr(layer, f"{name}_{part}") for layer in (both, lrkv))
            own, given = ours.get_metadata(), theirs.get_metadata()
            assert (own["std"], own["spec"].batch) == (given["std"], given["spec"].batch)
            setattr(both, f"{name}_{part}", theirs)
    assert error(forward(both, X_BTD), forward(lrkv, X_BTD)) <= 1e-5


def test_a_doubled_rate_moves_a_head_s_matrix_twice_as_far():
    plain, doubled = (layer_of(per_head(rate=rate)) for rate in (1.0, 2.0))
    before_HDK = 0.1 * np.float32(np.random.default_rng(1).standard_normal((HEADS, WIDTH, 8)))
    target_HDK = np.float32(np.random.default_rng(2).standard_normal((HEADS, WIDTH, 8)))

    def moved(layer):
        layer.key[...] = jnp.asarray(before_HDK / layer.config.attention.rate)
        muon = scale_by_muon(layer.key.get_metadata()["spec"])
        # Muon takes a gradient's direction alone.
        update_HDK, _ = muon.update(before_HDK - target_HDK, muon.init(before_HDK))
        layer.key[...] -= 0.01 * update_HDK
        return np.asarray(layer.matrices("key")) - before_HDK

    np.testing.assert_allclose(moved(doubled), 2 * moved(plain), rtol=1e-3, atol=1e-5)
