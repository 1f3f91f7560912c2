"""The feed-forward layer against its formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.config.reference import all_settings
from lrkv_jax.models.mlp import MLP, relu2

ACTIVATIONS = {
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
    # jax's default, the tanh form.
    "gelu": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_equals_float64(activation, gated):
    rng = np.random.default_rng(0)
    layer = MLP(4, 6, activation, gated=gated)
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


def test_the_setting_says_which_gelu_it_is():
    """A21: gelu was the tanh form, and nothing said so."""
    (activation,) = all_settings("model.activation")
    assert "gelu is its tanh approximation" in activation.meaning


def test_it_adds_nothing_at_the_start():
    x = np.ones((1, 2, 4), np.float32)
    assert not np.any(MLP(4, 6, "relu2")(x))


def test_relu2s_gradient_is_twice_relu_and_keeps_one_array():
    x = np.array([-2.0, -0.0, 0.0, 0.5, 3.0], np.float32)
    np.testing.assert_array_equal(jax.vmap(jax.grad(relu2))(x), [0, 0, 0, 1, 6])
    pull = jax.eval_shape(lambda x: jax.vjp(relu2, x)[1], jax.ShapeDtypeStruct((5,), jnp.bfloat16))
    assert [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape] == [(5,)]
