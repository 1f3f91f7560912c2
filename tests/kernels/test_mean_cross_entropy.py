"""The training loss: its value and its gradient, made in the forward pass, are the plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.kernels.cross_entropy import chunked_cross_entropy, mean_cross_entropy

B, T, D, V = 3, 8, 5, 11


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x_BTD = 2 * jax.random.normal(keys[0], (B, T, D), dtype)
    kernel_DV = 3 * jax.random.normal(keys[1], (D, V))
    return x_BTD, kernel_DV, jax.random.randint(keys[2], (B, T), 0, V)


def plain_gradient(x_BTD, kernel_DV, targets_BT, softcap):
    """d mean(nll) / d x and d kernel in float64, by the chain rule on the whole logits."""
    x, w = np.asarray(x_BTD, np.float64), np.asarray(kernel_DV, np.float64)
    z = x @ w
    capped = z if softcap is None else softcap * np.tanh(z / softcap)
    p = np.exp(capped) / np.exp(capped).sum(-1, keepdims=True)
    slope = (p - np.eye(V)[targets_BT]) / (B * T)
    if softcap is not None:
        slope = slope / np.cosh(z / softcap) ** 2
    return slope @ w.T, np.einsum("btd,btv->dv", x, slope)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("chunk", [1, 9, 10_000])
def test_gradient_equals_the_chain_rule_in_float64(softcap, chunk):
    x_BTD, kernel_DV, targets_BT = inputs()

    def loss(x_BTD, kernel_DV):
        mean, _ = mean_cross_entropy(x_BTD, kernel_DV, targets_BT, softcap=softcap, chunk=chunk)
        return 7 * mean  # a cotangent other than 1

    got = jax.grad(loss, argnums=(0, 1))(x_BTD, kernel_DV)
    for mine, exact in zip(got, plain_gradient(x_BTD, kernel_DV, targets_BT, softcap), strict=True):
        np.testing.assert_allclose(mine, 7 * exact, rtol=1e-5, atol=1e-6)


def test_value_and_nats_are_those_of_the_chunked_loss_differentiated_or_not():
    x_BTD, kernel_DV, targets_BT = inputs()
    how = {"softcap": 15.0, "chunk": 9}
    nll_BT = chunked_cross_entropy(x_BTD, kernel_DV, targets_BT, **how)
    mean, nats_BT = mean_cross_entropy(x_BTD, kernel_DV, targets_BT, **how)
    (same, same_BT), _ = jax.value_and_grad(
        lambda x: mean_cross_entropy(x, kernel_DV, targets_BT, **how), has_aux=True
    )(x_BTD)
    for value, nats in ((mean, nats_BT), (same, same_BT)):
        np.testing.assert_allclose(value, nll_BT.mean(), rtol=1e-6)
        np.testing.assert_allclose(nats, nll_BT, rtol=1e-5)


def test_nats_carry_no_gradient():
    x_BTD, kernel_DV, targets_BT = inputs()
    how = {"softcap": 15.0, "chunk": 9}
    grad = jax.grad(lambda x: mean_cross_entropy(x, kernel_DV, targets_BT, **how)[1].sum())(x_BTD)
    assert not grad.any()


def test_bfloat16_inputs_get_bfloat16_gradients_and_a_float32_kernel_gradient():
    x_BTD, kernel_DV, targets_BT = inputs(jnp.bfloat16)

    def loss(x_BTD, kernel_DV):
        return mean_cross_entropy(x_BTD, kernel_DV, targets_BT, softcap=15.0, chunk=9)[0]

    grad_BTD, grad_DV = jax.grad(loss, argnums=(0, 1))(x_BTD, kernel_DV)
    assert (grad_BTD.dtype, grad_DV.dtype) == (jnp.bfloat16, jnp.float32)
    exact_BTD, exact_DV = plain_gradient(x_BTD, kernel_DV, targets_BT, 15.0)
    # A few roundings to 8 bits of mantissa, relative to the largest entry.
    for mine, exact in ((grad_BTD, exact_BTD), (grad_DV, exact_DV)):
        np.testing.assert_allclose(mine.astype(jnp.float32), exact, atol=0.03 * abs(exact).max())


def test_whole_logits_never_exist_in_value_or_gradient():
    x_BTD, kernel_DV, targets_BT = inputs()

    def loss(x, w):
        return mean_cross_entropy(x, w, targets_BT, softcap=15.0, chunk=B * 2)[0]

    # A chunk is 2 positions of each row: B · 2 · V logits, a quarter of all.
    for function in (loss, jax.grad(loss, argnums=(0, 1))):
        text = str(jax.make_jaxpr(function)(x_BTD, kernel_DV))
        assert f"{B},2,{V}]" in text
        assert f"{B},{T},{V}]" not in text and f"{T // 2},{B},2,{V}]" not in text
