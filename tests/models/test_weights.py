"""A weight's layout: its axes, fans, initial spread and the tree of specs."""

import jax
import numpy as np
from flax import nnx

from lrkv_jax.models.weights import WeightSpec, draw, weight, weight_specs


def drawn(module, seed=0):
    draw(module, jax.random.key(seed))
    return module


def test_the_spread_is_by_fan_in_and_smaller_for_narrow_outputs_or_as_given():
    layer = drawn(
        nnx.Dict(
            narrow=weight("embed -> mlp", (400, 100)),
            wide=weight("embed -> mlp", (100, 400)),
            given=weight("embed -> mlp", (200, 200), std=2.0),
            zero=weight("a -> b", (3, 4), std=0),
            one=nnx.Param(np.ones(5), spec=WeightSpec(("a",), 0, 1, "vector")),
        )
    )
    for name, std in {"narrow": 1 / 20 / 2, "wide": 1 / 10, "given": 2.0}.items():
        value = getattr(layer, name)[...]
        # The sample's standard deviation is off by 1/sqrt(2n) of itself; four of them.
        assert abs(float(value.std()) / std - 1) < 4 / np.sqrt(2 * value.size)
        assert abs(float(value.mean())) < 4 * std / np.sqrt(value.size)
        assert value.dtype == np.float32
    assert not np.any(layer.zero[...]) and np.all(layer.one[...] == 1)


class Two(nnx.Module):
    def __init__(self, _=None):
        self.first = weight("embed -> mlp", (2, 3))
        self.second = weight("vocabulary -> embed", (5, 2), group="embedding")


def stack_of(layers):
    return nnx.vmap(Two)(jax.numpy.arange(layers))


def test_a_weight_depends_on_key_path_layer_and_shape_alone():
    one, more = drawn(Two()), Two()
    more.first, more.third = weight("a: b -> c", (1, 2, 3), std=9.0), weight("a -> b", (5, 2))
    assert np.array_equal(drawn(more).second[...], one.second[...])
    assert not np.array_equal(more.third[...], one.second[...])
    assert not np.array_equal(drawn(Two(), seed=1).second[...], one.second[...])
    few, many = drawn(stack_of(2)).first[...], drawn(stack_of(4)).first[...]
    assert many.shape == (4, 2, 3) and np.array_equal(few, many[:2])
    assert weight_specs(stack_of(2))["first"] == WeightSpec.parse("embed -> mlp").stacked()
    assert len(np.unique(many)) == many.size  # each layer its own draw
