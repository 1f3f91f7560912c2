"""Heads change places with positions and back, and nobody can tell."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.meshes import mesh_of

from lrkv_jax.distributed import manual_sharding
from lrkv_jax.kernels.flash import causal_attention
from lrkv_jax.models.attention.context_parallel import attend_sequences

B, T, W, K = 2, 8, 6, 4


def inputs(heads, key_heads):
    rng = np.random.default_rng(heads + 10 * key_heads)
    shapes = ((B, T, heads, W), (B, T, key_heads, W), (B, T, key_heads, K))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 5 + [1] * 3], np.int32)
    return q, k, v, segments


@pytest.mark.parametrize(
    ("heads", "key_heads", "context", "tensor"),
    [
        pytest.param(4, 4, 4, 1, id="a_key_head_for_each_query", marks=pytest.mark.slow),
        pytest.param(4, 1, 2, 2, id="one_key_head_for_all"),
        pytest.param(8, 2, 2, 4, id="fewer_key_heads_than_tensor_shards", marks=pytest.mark.slow),
        pytest.param(8, 4, 4, 2, id="two_devices_for_each_key_head"),
    ],
)
def test_attention_over_a_mesh_is_attention(heads, key_heads, context, tensor):
    q, k, v, segments = inputs(heads, key_heads)
    mesh = mesh_of(context=context, tensor=tensor)
    attend = partial(attend_sequences, scale=0.3, key_heads=key_heads)

    def step(q, k, v, segments):
        split = P(None, None, "tensor")
        groups = split if key_heads % tensor == 0 else P()
        return manual_sharding.over_tensor(
            lambda q, k, v, s: attend(q, k, v, segments_BT=s), (split, groups, groups, P()), split
        )(q, k, v, segments)

    rows = P(None, "context")
    mapped = manual_sharding.train_step(step, mesh, (rows,) * 4, rows)

    def both(f):
        def value(q, k, v):
            out = f(q, k, v)
            return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    truth_grads, truth = both(partial(causal_attention, scale=0.3, segments_BT=segments))
    with jax.set_mesh(mesh):
        grads, out = both(lambda q, k, v: mapped(q, k, v, segments))
    np.testing.assert_allclose(out, truth, atol=2e-6)
    for got, expected in zip(grads, truth_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=5e-6)
