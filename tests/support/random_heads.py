"""Layers of heads with random parts, made without a model."""

import numpy as np

from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual

H, D, K, R = 4, 24, 8, 3


def parts(H=H, D=D, K=K, R=R, seed=0):
    rng = np.random.default_rng(seed)
    return SharedResidual(
        rng.standard_normal((D, K)), rng.standard_normal((H, D, R)), rng.standard_normal((H, R, K))
    )


def lrkv_heads() -> HeadWeights:
    rng, key, value = np.random.default_rng(9), parts(seed=1), parts(seed=2)
    query, output = rng.standard_normal((H, D, K)), rng.standard_normal((H, K, D))
    return HeadWeights(
        query, key.total_HDK, value.total_HDK, output, key_parts=key, value_parts=value
    )


def mha_heads() -> HeadWeights:
    rng = np.random.default_rng(9)
    return HeadWeights(*rng.standard_normal((3, H, D, K)), rng.standard_normal((H, K, D)))
