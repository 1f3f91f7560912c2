"""RMSNorm against its formula in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.nn.norm import Norm, inverse_rms, rms_norm


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_equals_float64(eps):
    x = np.random.default_rng(0).standard_normal((3, 5, 8))
    inverse = 1 / np.sqrt((x**2).mean(-1) + eps)
    np.testing.assert_allclose(inverse_rms(np.float32(x), eps), inverse, rtol=1e-6)
    np.testing.assert_allclose(rms_norm(np.float32(x), eps), x * inverse[..., None], rtol=2e-6)


def test_zeros_stay_zeros_and_the_dtype_stays():
    assert not np.any(rms_norm(jnp.zeros((2, 4)), 1e-6))
    x = jnp.full((2, 4), 3e19, jnp.bfloat16)  # its square overflows float32's neighbour, float16
    assert rms_norm(x / 1e10, 1e-6).dtype == jnp.bfloat16
    assert inverse_rms(x / 1e10, 1e-6).dtype == jnp.float32


def test_gain_multiplies_each_coordinate_and_exists_only_if_asked_for():
    x = np.float32(np.random.default_rng(0).standard_normal((2, 4)))
    plain, gained = Norm(4, gain=False, eps=1e-6), Norm(4, gain=True, eps=1e-6)
    assert plain.gain is None
    np.testing.assert_array_equal(gained(x), plain(x))
    gained.gain[...] = jnp.array([1.0, 2.0, -3.0, 0.0])
    np.testing.assert_allclose(gained(x), np.asarray(plain(x)) * [1, 2, -3, 0], rtol=1e-6)
