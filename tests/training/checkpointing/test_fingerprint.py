"""An array's fingerprint depends on its bits and their places alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax.training.checkpointing.fingerprint import as_hex, fingerprints


def of(x) -> str:
    return as_hex(fingerprints([jnp.asarray(x)]))[0]


def mix(x):
    """MurmurHash3's finaliser in Python's integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def by_hand(values) -> str:
    """The two sums of an array of 32 bits, in Python's integers."""
    mixed = [mix(int(v) ^ i * 0x9E3779B1 % 2**32) for i, v in enumerate(np.ravel(values))]
    second = [(m ^ (m >> 15)) * (m | 1) % 2**32 for m in mixed]
    return f"{sum(mixed) % 2**32:08x}{sum(second) % 2**32:08x}"


def test_it_is_the_sums_that_the_module_describes():
    values = np.random.default_rng(0).integers(0, 2**32, (3, 5, 7), np.uint32)
    assert of(values) == by_hand(values)
    assert of(values.view(np.float32)) == by_hand(values), "a float is its bits"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_no_sharding_changes_it(dtype):
    values = np.random.default_rng(1).normal(size=(8, 4, 6)) * 50
    x = jnp.asarray(values > 0 if dtype == "bool" else values).astype(dtype)
    expected = of(x)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    for spec in (P("a"), P("b", "a")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert as_hex(fingerprints([placed])) == [expected], spec


def test_what_flips_moves_or_vanishes_changes_both_halves():
    x = np.random.default_rng(3).normal(size=96).astype(np.float32)
    flipped = (x.view(np.uint32) ^ (np.arange(96) == 5)).astype(np.uint32)
    changed = {
        "one bit": flipped.view(np.float32),
        "reversed": x[::-1],
        "shifted by a block": np.roll(x, 16),
        "swapped blocks": np.concatenate([x[32:64], x[:32], x[64:]]),
        "zeroed": np.where(np.arange(96) < 8, np.float32(0), x),
    }
    for name, values in changed.items():
        before, after = of(x), of(values)
        assert before[:8] != after[:8] and before[8:] != after[8:], name


def test_zeros_and_nothing_have_fingerprints_too():
    # Moments start at zero, and LRKV of rank 0 has empty residuals.
    assert of(np.zeros(4, np.float32)) != of(np.zeros(5, np.float32))
    assert of(np.zeros((0, 3), np.float32)) == "0" * 16
    assert of(np.float32(0.0)) != of(np.float32(-0.0))
