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


def test_the_gradient_keeps_x_as_it_is_and_a_number_a_row():
    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    pull = jax.eval_shape(lambda x: jax.vjp(lambda x: rms_norm(x, 1e-6), x)[1], x)
    kept = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull))
    assert kept == [("bfloat16", (4, 8)), ("float32", (4,))]


def test_zeros_stay_zeros_and_the_dtype_stays():
    assert not np.any(rms_norm(jnp.zeros((2, 4)), 1e-6))
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert rms_norm(x, 1e-6).dtype == jnp.bfloat16 and inverse_rms(x, 1e-6).dtype == jnp.float32


ACTIVATIONS = {
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
    # jax's default, the tanh form.
    "gelu": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize(
    ("activation", "gated"), [("relu2", False), ("silu", True), ("gelu", False)]
)
def test_mlp_equals_float64(activation, gated):
    rng = np.random.default_rng(0)
    layer = MLP(4, 6, activation, gated=gated)
    assert not np.any(layer.down[...])  # at the start it adds nothing
    for name in ("up", "gate", "down") if gated else ("up", "down"):
        weight = getattr(layer, name)
        weight[...] = np.float32(rng.standard_normal(weight.shape))
    x = np.float32(rng.standard_normal((2, 3, 4)))
    # Llama's: down(act(gate x) * up x).
    first = layer.gate if gated else layer.up
    hidden = np.vectorize(ACTIVATIONS[activation])(np.float64(x) @ np.float64(first[...]))
    if gated:
        hidden *= np.float64(x) @ np.float64(layer.up[...])
    truth = hidden @ np.float64(layer.down[...])
    np.testing.assert_allclose(layer(x), truth, rtol=1e-5, atol=1e-6)


def test_relu2s_gradient_is_twice_relu_and_keeps_one_array():
    x = np.array([-2.0, -0.0, 0.0, 0.5, 3.0], np.float32)
    np.testing.assert_array_equal(jax.vmap(jax.grad(relu2))(x), [0, 0, 0, 1, 6])
    pull = jax.eval_shape(lambda x: jax.vjp(relu2, x)[1], jax.ShapeDtypeStruct((5,), jnp.bfloat16))
    assert [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape] == [(5,)]
