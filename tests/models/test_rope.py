"""Rotary positions: the convention, and frequencies."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.models.rope import frequencies, logit_factor, rope_angles, rotate

# As transformers 5.23.0 computes them on a CPU, in float32: `ROPE_INIT_FUNCTIONS`.
TRANSFORMERS = json.loads(Path(__file__).with_name("rope_frequencies.json").read_text())


def turned(x, positions, base=10_000.0):
    return np.asarray(rotate(np.float32(x), *rope_angles(np.asarray(positions), x.shape[-1], base)))


def test_pairs_and_signs_are_hugging_face_llamas():
    """rotate_half: x · cos + [−x2, x1] · sin, angles p · base^(−2j/W) repeated for both halves.

    An odd last coordinate is left alone, and position 0 is the identity.
    """
    x, p = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), 2
    a, b = 2.0, 2.0 * 100.0 ** (-2 / 5)  # base 100
    expected = [
        1 * np.cos(a) - 3 * np.sin(a), 2 * np.cos(b) - 4 * np.sin(b),
        3 * np.cos(a) + 1 * np.sin(a), 4 * np.cos(b) + 2 * np.sin(b), 5,
    ]  # fmt: skip
    np.testing.assert_allclose(turned(x, [p], base=100.0)[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(turned(x, [0]), x)


def test_bfloat16_rotates_in_float32():
    """At position 1000 a bfloat16 angle would be off by whole radians."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.bfloat16)
    out = rotate(x, *rope_angles(np.array([1000, 1001, 1002]), 8, 1e4))
    assert out.dtype == jnp.bfloat16
    truth = turned(np.asarray(x, np.float32), [1000, 1001, 1002])
    np.testing.assert_allclose(np.float32(out), truth, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("scaling", [None, RopeScaling(kind="linear", factor=8)])
@pytest.mark.parametrize(("width", "base"), [(7, 1e4), (128, 5e5)])
def test_angles_are_exact_at_every_position(width, base, scaling):
    positions = np.r_[np.arange(0, 300_000, 31), 2**24 + 1, 2**30, -5]
    cos, sin = rope_angles(positions, width, base, scaling)
    angles = np.outer(positions, frequencies(width, base, scaling))
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-7, rtol=0)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-7, rtol=0)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_scaled_frequencies_and_factors_are_transformers(name):
    known = TRANSFORMERS[name]
    width, base, scaling = known["width"], known["base"], RopeScaling(**known["scaling"])
    np.testing.assert_allclose(
        frequencies(width, base, scaling), known["frequencies"], rtol=1e-6, atol=0
    )
    assert logit_factor(scaling) == pytest.approx(known["attention_factor"] ** 2, rel=1e-12)
