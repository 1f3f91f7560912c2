"""The chunked loss and its gradient against the plain formula in float64.

B batch  T positions  D width  V vocabulary
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hlo
from support.jaxprs import sizes

from lrkv_jax.kernels.cross_entropy import LOW_CAP, Teacher, mean_cross_entropy

B, T, D, V = 2, 15, 6, 11


def inputs(size=3):
    rng = np.random.default_rng(0)
    x, kernel = size * rng.standard_normal((B, T, D)), 3 * rng.standard_normal((D, V))
    return np.float32(x), np.float32(kernel), rng.integers(0, V, (B, T))


def plain(x, kernel, targets, softcap):
    """nll [B, T], and the gradients of its mean."""
    x, kernel = np.float64(x), np.float64(kernel)
    z = x @ kernel
    logits = z if softcap is None else softcap * np.tanh(z / softcap)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    onehot = np.eye(V)[targets]
    slope = (p - onehot) * (1 if softcap is None else 1 - np.tanh(z / softcap) ** 2) / (B * T)
    nll = -np.log((p * onehot).sum(-1))
    return nll, slope @ kernel.T, np.einsum("btd,btv->dv", x, slope)


@pytest.mark.parametrize(
    ("softcap", "chunk", "size"), [(None, 1000, 3), (15.0, 7, 3), (LOW_CAP, 7, 30), (99.0, 7, 30)]
)
def test_value_and_gradient_equal_float64(softcap, chunk, size):
    """Chunks that do not divide B·T, and one that holds all of it; differentiated or not.

    Most logits of large inputs are at the cap, or as far below zero.
    """
    x, kernel, targets = inputs(size)
    nll, grad_x, grad_kernel = plain(x, kernel, targets, softcap)
    how = {"softcap": softcap, "chunk": chunk}

    def scaled(x, kernel):  # a factor, to see the cotangent used
        mean, each = mean_cross_entropy(x, kernel, targets, **how)
        return 3 * mean, (mean, each)

    @jax.jit
    def everything(x, kernel):
        once = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(x, kernel)
        return scaled(x, kernel)[1], once

    plainly, ((_, differentiated), (dx, dkernel)) = everything(x, kernel)
    for mean, each in (plainly, differentiated):
        np.testing.assert_allclose(each, nll, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mean, nll.mean(), rtol=1e-5)
    np.testing.assert_allclose(dx, 3 * grad_x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dkernel, 3 * grad_kernel, rtol=1e-4, atol=1e-5)


def test_a_teacher_s_distribution_is_learned_by_its_divergence():
    """Against float64: KL, its gradient, and the teacher's none; half of the tokens counted."""
    softcap = 4.0
    x, kernel, targets = inputs()
    rng = np.random.default_rng(1)
    theirs = np.float32(rng.standard_normal((B, T, 4))), np.float32(rng.standard_normal((4, V)))
    counted = rng.integers(0, 2, (B, T)).astype(bool)

    def log_p(x, kernel, cap):
        z = np.float64(x) @ np.float64(kernel)
        logits = cap * np.tanh(z / cap)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), z

    (log_q, _), (log_p_, z) = log_p(*theirs, 7.0), log_p(x, kernel, softcap)
    q = np.exp(log_q)
    kl = (q * (log_q - log_p_)).sum(-1)
    slope = (np.exp(log_p_) - q) * counted[..., None] / counted.sum()
    slope *= 1 - np.tanh(z / softcap) ** 2

    def loss(x, kernel, theirs):
        how = {"softcap": softcap, "chunk": 5, "teacher": Teacher(*theirs, 7.0)}
        return mean_cross_entropy(x, kernel, targets, counted, counted.sum(), **how)

    (mean, nll), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        x, kernel, theirs
    )
    assert mean == pytest.approx((kl * counted).sum() / counted.sum(), rel=1e-5)
    np.testing.assert_allclose(nll, plain(x, kernel, targets, softcap)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads[0], slope @ np.float64(kernel).T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads[1], np.einsum("btd,btv->dv", x, slope), rtol=1e-4, atol=1e-6)
    assert jax.jit(loss)(x, kernel, theirs)[0] == pytest.approx(float(mean), rel=1e-6)


def test_bfloat16_inputs_get_bfloat16_gradients_and_a_float32_kernel_gradient():
    x, kernel, targets = inputs()
    x = jnp.asarray(x, jnp.bfloat16)

    def loss(x, kernel):
        return mean_cross_entropy(x, kernel, targets, softcap=15.0, chunk=9)[0]

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
    assert [grad.dtype for grad in got] == [jnp.bfloat16, jnp.float32]
    # A few roundings to 8 bits of mantissa, relative to the largest entry.
    for mine, exact in zip(got, plain(x, kernel, targets, 15.0)[1:], strict=True):
        np.testing.assert_allclose(np.float64(mine), exact, atol=0.03 * abs(exact).max())


def test_all_logits_are_never_held():
    """No array of a training step is larger than a chunk's logits (V far wider than D)."""
    tokens, vocabulary, chunk = 64, 1000, 16

    def mean(x, kernel, targets):
        return mean_cross_entropy(x, kernel, targets, softcap=15.0, chunk=chunk)[0]

    jaxpr = jax.make_jaxpr(jax.grad(mean, argnums=(0, 1)))(
        jnp.zeros((2, tokens, 4)), jnp.zeros((4, vocabulary)), jnp.zeros((2, tokens), int)
    )
    largest = max(sizes(jaxpr.jaxpr))
    assert chunk * vocabulary <= largest < 2 * tokens * vocabulary / 4


def test_a_loss_without_a_gradient_multiplies_once():
    """The gradient's products, which are in its forward pass, are compiled for nobody."""
    x, kernel, targets = inputs()
    loss = jax.jit(lambda *args: mean_cross_entropy(*args, softcap=15.0, chunk=7))
    compiled = loss.lower(x, kernel, targets).compile()
    assert hlo.product_flops(compiled.as_text()) == 2 * B * T * D * V
