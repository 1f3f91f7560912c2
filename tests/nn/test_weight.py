"""A weight's layout: its axes, fans, initial spread and the tree of specs."""

import jax
import numpy as np
import pytest
from flax import nnx

from lrkv_jax.nn.weight import WeightSpec, weight, weight_specs


@pytest.mark.parametrize(
    ("layout", "axes", "batch", "inputs", "shape", "fans"),
    [
        ("embed -> mlp", ("embed", "mlp"), 0, 1, (3, 5), (3, 5)),
        ("embed -> heads head_width", ("embed", "heads", "head_width"), 0, 1, (3, 4, 5), (3, 20)),
        ("heads head_width -> embed", ("heads", "head_width", "embed"), 0, 2, (4, 5, 3), (20, 3)),
        ("heads: embed -> rank", ("heads", "embed", "rank"), 1, 1, (4, 3, 2), (3, 2)),
    ],
)
def test_a_layout_names_the_axes_and_the_fans(layout, axes, batch, inputs, shape, fans):
    spec = WeightSpec.parse(layout)
    assert (spec.axes, spec.batch, spec.inputs, spec.group) == (axes, batch, inputs, "matrix")
    assert spec.fans(shape) == fans
    stacked = spec.stacked()
    assert stacked.axes == ("layers", *axes) and stacked.batch == batch + 1
    assert stacked.fans((7, *shape)) == fans


@pytest.mark.parametrize(
    ("shape", "std"), [((400, 100), 1 / 20 / 2), ((100, 400), 1 / 10), ((300, 300), 300**-0.5)]
)
def test_the_default_spread_is_by_fan_in_and_smaller_for_narrow_outputs(shape, std):
    value = weight(nnx.Rngs(0), "embed -> mlp", shape)[...]
    # The sample's standard deviation is off by 1/sqrt(2n) of itself: 0.4 % here; four of them.
    assert abs(float(value.std()) / std - 1) < 4 / np.sqrt(2 * value.size)
    assert abs(float(value.mean())) < 4 * std / np.sqrt(value.size)
    assert value.dtype == np.float32


def test_std_is_as_given_and_zero_draws_nothing():
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    assert not np.any(weight(rngs, "a -> b", (3, 4), std=0)[...])
    after = weight(rngs, "a -> b", (200, 200), std=2.0)[...]
    np.testing.assert_array_equal(after, weight(other, "a -> b", (200, 200), std=2.0)[...])
    assert abs(float(after.std()) / 2 - 1) < 0.02


def test_specs_mirror_the_parameters_and_know_when_they_are_stacked():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first = weight(rngs, "embed -> mlp", (2, 3))
            self.second = weight(rngs, "vocabulary -> embed", (5, 2), group="embedding")

    one = Two(nnx.Rngs(0))
    many = nnx.vmap(lambda key: Two(nnx.Rngs(params=key)))(jax.random.split(jax.random.key(0), 4))
    assert set(weight_specs(one)) == {"first", "second"}
    assert weight_specs(one)["second"] == WeightSpec.parse("vocabulary -> embed", "embedding")
    assert weight_specs(many)["first"] == WeightSpec.parse("embed -> mlp").stacked()
    assert many.first[...].shape == (4, 2, 3)
    assert np.ptp(np.asarray(many.first[...])[:, 0, 0]) > 0  # each its own draw
