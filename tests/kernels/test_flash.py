"""Whole-sequence attention and its gradient against float64, for each path that runs on a CPU."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch, flash
from lrkv_jax.kernels.flash import chunked

SCALE = 0.7


def oracle(q, k, v, grad, segments=None, window=None):
    """Output and gradients in float64, a head at a time, from the softmax's closed form."""
    q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
    out, dq, dk, dv = np.zeros(grad.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    T = q.shape[1]
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        g = h // (q.shape[2] // k.shape[2])
        seen = np.tril(np.ones((T, T), bool))
        if segments is not None:
            seen &= segments[b][:, None] == segments[b]
        if window is not None:
            seen &= np.subtract.outer(np.arange(T), np.arange(T)) < window
        logits = np.where(seen, SCALE * q[b, :, h] @ k[b, :, g].T, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[b, :, h] = weights @ v[b, :, g]
        dweights = grad[b, :, h] @ v[b, :, g].T
        dlogits = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))
        dq[b, :, h] = SCALE * dlogits @ k[b, :, g]
        dk[b, :, g] += SCALE * dlogits.T @ q[b, :, h]
        dv[b, :, g] += weights.T @ grad[b, :, h]
    return out, dq, dk, dv


def arrays(B, T, H, G, K, W, seed=0):
    """q, k, v and a gradient of the output, float32."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, W), (B, T, H, W)
    return [np.float32(rng.standard_normal(shape)) for shape in shapes]


@functools.cache
def program(attend, window=None):
    """Jitted: output and the gradients of q, k and v."""

    def both(q, k, v, grad, segments):
        how = {"scale": SCALE, "segments_BT": segments, "window": window}
        out, back = jax.vjp(lambda *qkv: attend(*qkv, **how), q, k, v)
        return out, *back(grad)

    return jax.jit(both)


def close(got, truth, atol=5e-6):
    for one, other in zip(got, truth, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=atol)


@pytest.mark.parametrize(
    ("groups", "documents", "window"), [(1, None, None), (2, [3, 2, 2], None), (1, [3, 2, 2], 2)]
)
def test_output_and_gradient_equal_float64(groups, documents, window):
    """Fewer key than query heads, values narrower than keys, packed documents, a window."""
    case = arrays(2, 7, 4, groups, 6, 5)
    segments = None
    if documents:  # another packing in the second row, and a number that comes back
        segments = np.stack([np.repeat([0, 1, 4], documents), np.repeat([2, 0, 2], documents)])
    run = program(partial(chunked.causal_attention, chunk=3), window)  # several tiles
    close(run(*case, segments), oracle(*case, segments, window))
    q, k, v, grad = case
    apart = 60 * q, 60 * k, v, grad  # logits that could overflow
    out, *grads = run(*apart, segments)
    truth, *_ = oracle(*apart, segments, window)
    np.testing.assert_allclose(out, truth, atol=1e-3)
    assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_shape_equals_float64(data):
    T, groups, share, K, W = (
        data.draw(st.integers(1, most), label=name)
        for name, most in (("T", 20), ("groups", 3), ("share", 3), ("K", 9), ("W", 9))
    )
    step = data.draw(st.integers(-(-T // 4), T + 2), label="step")
    changes = data.draw(st.lists(st.booleans(), min_size=T, max_size=T), label="changes")
    segments = np.cumsum(changes)[None] if data.draw(st.booleans(), label="packed") else None
    window = data.draw(st.none() | st.integers(1, T + 2), label="window")
    case = arrays(1, T, groups * share, groups, K, W, seed=T)
    run = program(partial(chunked.causal_attention, chunk=step), window)
    close(run(*case, segments), oracle(*case, segments, window))


def test_bfloat16_is_summed_in_float32():
    """The error is that of rounding inputs, weights and results, not of a running bfloat16 sum."""
    case = [jnp.bfloat16(x) for x in arrays(1, 96, 2, 2, 8, 8)]
    out, *grads = program(partial(chunked.causal_attention, chunk=4))(*case, None)
    truth, *true_grads = oracle(*case)
    assert out.dtype == grads[0].dtype == jnp.bfloat16
    close([out], [truth], atol=2e-2)
    for got, true in zip(grads, true_grads, strict=True):
        assert np.abs(np.asarray(got, np.float64) - true).max() < 2e-2 * np.abs(true).max()
    # Each gradient has its array's dtype.
    mixed = jax.eval_shape(
        program(chunked.causal_attention), case[0], *map(jnp.float32, case[1:]), None
    )
    assert [x.dtype for x in mixed[1:]] == [jnp.bfloat16, jnp.float32, jnp.float32]


@pytest.mark.slow
def test_memory_is_linear_in_the_sequence():
    """By XLA's own analysis, forward and backward."""
    nbytes = []
    for T in (1024, 4096):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(1, T, 2, 2, 8, 8)]
        compiled = program(chunked.causal_attention).lower(*shapes, None).compile()
        nbytes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert nbytes[1] < 4.1 * nbytes[0]


def test_a_cpu_chooses_tiles_and_what_cannot_be_chosen_is_refused(caplog):
    dispatch._log_once.cache_clear()
    with caplog.at_level("INFO", logger="lrkv_jax.kernels"):
        assert flash.choose(*arrays(1, 8, 1, 1, 8, 8)[:3]) == "chunked"
    (record,) = caplog.records
    assert record.message == "causal_attention runs on chunked: the backend is cpu, not a GPU"
    assert dispatch.choices()["causal_attention"].startswith("chunked: ")
    for how, message in (
        ({"impl": "cudnn"}, "cannot run as cudnn: the backend is cpu, not a GPU; use auto"),
        ({"impl": "flash"}, "train kernel 'flash' is unknown: use auto, chunked, cudnn"),
        ({"window": 0}, "a window of 0 positions: use 1 or more"),
    ):
        with pytest.raises(LrkvError, match=message):
            flash.causal_attention(*arrays(1, 4, 1, 1, 8, 8)[:3], scale=1.0, **how)
