"""A layer's decode needs little memory beside its cache; compiled from shapes alone."""

import jax
import jax.numpy as jnp
import pytest

from lrkv_jax.config import load_config
from lrkv_jax.models.attention import abstract_layer


@pytest.mark.parametrize(
    ("rope", "dtype"),
    [
        ("full", "bfloat16"),
        pytest.param("full", "float32", marks=pytest.mark.slow),
        pytest.param("latent", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_decode_at_36x2304_takes_at_most_64_megabytes(rope, dtype):
    """Batch 4, 8192 tokens: all 18 heads' keys would be 302 MB in float32."""
    overrides = ["attention=lrkv", f"attention.rope={rope}", f"model.dtype={dtype}"]
    layer = abstract_layer(load_config("2.5b", overrides).model)
    weights, tree = jax.tree.flatten(layer)

    def step(weights, x_B1D, cache, lengths_B):
        return jax.tree.unflatten(tree, weights).decode(x_B1D, cache, lengths_B)

    shapes = (
        [jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf in weights],
        jax.ShapeDtypeStruct((4, 1, 2304), dtype),
        layer.stored_shapes(4, 8192, jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    memory = jax.jit(step, donate_argnums=2).lower(*shapes).compile().memory_analysis()
    assert 0 < memory.temp_size_in_bytes <= 64_000_000
    # The cache is written in place: what goes in comes out, aliased.
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    cache_bytes = 4 * 8192 * (2 * (128 + 18 * 56) * itemsize + 18 * 4)
    assert memory.alias_size_in_bytes >= cache_bytes
