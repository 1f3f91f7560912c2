"""RMSNorm and the feed-forward layer against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.models.layers import MLP, inverse_rms, relu2, rms_norm


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
