"""RMSNorm and the feed-forward layer against float64; what a weight is drawn from."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lrkv_jax.models.layers import MLP, inverse_rms, relu2, rms_norm
from lrkv_jax.models.weights import WeightSpec, draw, weight, weight_specs


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_and_its_gradient_equal_float64(eps):
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 5, 8))
    # d(x/r)ᵢ/dxⱼ = δᵢⱼ/r − xᵢ xⱼ/(D r³), r² = mean(x²) + eps
    r = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    truth = dy / r - x * (x * dy).mean(-1, keepdims=True) / r**3
    np.testing.assert_allclose(inverse_rms(np.float32(x), eps), 1 / r[..., 0], rtol=1e-6)
    out, pull = jax.vjp(lambda x: rms_norm(x, eps), np.float32(x))
    np.testing.assert_allclose(out, x / r, rtol=2e-6)
    np.testing.assert_allclose(pull(np.float32(dy))[0], truth, rtol=1e-5, atol=1e-6)
    assert not np.any(rms_norm(jnp.zeros((2, 4)), eps))


def test_the_gradient_keeps_x_as_it_is_and_a_number_a_row():
    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    pull = jax.eval_shape(lambda x: jax.vjp(lambda x: rms_norm(x, 1e-6), x)[1], x)
    kept = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull))
    assert kept == [("bfloat16", (4, 8)), ("float32", (4,))]


def test_a_gated_mlp_with_gelu_equals_float64():
    """Other MLPs are in models, tests/repository/test_model.py."""
    rng = np.random.default_rng(0)
    layer = MLP(4, 6, "gelu", gated=True)
    assert not np.any(layer.down[...])  # at the start it adds nothing
    for name in ("up", "gate", "down"):
        weight = getattr(layer, name)
        weight[...] = np.float32(rng.standard_normal(weight.shape))
    x = np.float32(rng.standard_normal((2, 3, 4)))
    gate, up, down = (np.float64(weight[...]) for weight in (layer.gate, layer.up, layer.down))
    # jax's default, the tanh form.
    h = x @ gate
    hidden = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) * (x @ up)
    np.testing.assert_allclose(layer(x), hidden @ down, rtol=1e-5, atol=1e-6)


def test_relu2s_gradient_is_twice_relu_and_keeps_one_array():
    x = np.array([-2.0, -0.0, 0.0, 0.5, 3.0], np.float32)
    np.testing.assert_array_equal(jax.vmap(jax.grad(relu2))(x), [0, 0, 0, 1, 6])
    pull = jax.eval_shape(lambda x: jax.vjp(relu2, x)[1], jax.ShapeDtypeStruct((5,), jnp.bfloat16))
    assert [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape] == [(5,)]


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


def test_weights_are_float32_and_the_same_where_jax_has_float64():
    plain = drawn(stack_of(2)).first[...]
    with jax.enable_x64(True):
        wide = drawn(stack_of(2)).first[...]
    assert plain.dtype == wide.dtype == np.float32 and np.array_equal(plain, wide)
