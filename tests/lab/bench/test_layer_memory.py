"""A layer's decode needs little memory beside its cache; compiled from shapes alone."""

import pytest

from lrkv_jax.lab.bench.decode import Settings, _subjects
from lrkv_jax.lab.bench.whole import compiled_layer

BOUND = 64_000_000
OTHERS = [(rope, dtype) for rope in ("shared", "latent") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("rope", "dtype"),
    [
        ("full", "float32"),
        ("full", "bfloat16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_a_decode_at_36x2304_takes_at_most_64_megabytes(rope, dtype):
    """Batch 4, 8192 tokens: all 18 heads' keys would be 302 MB in float32."""
    settings = Settings(variants=("lrkv",), ropes=(rope,), dtype=dtype)
    (line,) = _subjects("36x2304", settings)
    memory = compiled_layer(line.config.model, 4, 8192, dtype).memory_analysis()
    assert 0 < memory.temp_size_in_bytes <= BOUND
    # The cache is written in place: what goes in comes out, aliased.
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    cache_bytes = 4 * 8192 * (2 * (128 + 18 * 56) * itemsize + 18 * 4)
    assert memory.alias_size_in_bytes >= cache_bytes
