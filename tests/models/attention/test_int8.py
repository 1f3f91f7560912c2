"""An int8 cache: rows within half a step, and decoding that reads what they stand for.

B batch  T new tokens  S cache slots
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import quick
from support.variants import ALL, PRETRAINED, error, random_model, small

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.int8 import Int8Rows
from lrkv_jax.models.attention import LRKV
from lrkv_jax.models.attention.cache import contiguous, slot_axes, slots_of

PAGE, PAGES = 8, 3  # slots of a sequence: 24
LAYERS = ("lrkv-full-groups", "gqa", "mla", "mla-full-rank", "lrkv-latent-groups")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_kept_to_half_a_step_of_their_largest_value(dtype):
    rng = np.random.default_rng(0)
    x_NW = (rng.standard_normal((500, 64)) * 10.0 ** rng.integers(-6, 6, (500, 1))).astype("f4")
    x_NW[7], x_NW[8, 1:] = 0, 0
    kept = Int8Rows.of(jnp.asarray(x_NW), jnp.dtype(dtype))
    assert kept.quantized.dtype == jnp.int8 and kept.scale.dtype == kept.dtype == jnp.dtype(dtype)
    back_NW = np.asarray(kept.quantized, np.float64) * np.asarray(kept.scale, np.float64)[:, None]
    largest_N1 = np.abs(x_NW).max(-1, keepdims=True)
    # Half a step; and where a scale of 8 bits is too small, the largest value is cut off by it.
    step = 0.5 / 127 * 1.004 + (2**-9 if dtype == "bfloat16" else 1e-6)
    assert (np.abs(back_NW - x_NW) <= step * largest_N1).all()
    assert (back_NW[7] == 0).all() and (back_NW[8, 1:] == 0).all()
    normal = np.delete(np.arange(500), [7, 8])
    errors = (back_NW - x_NW)[normal] / np.sqrt((x_NW[normal] ** 2).mean(-1, keepdims=True))
    assert 0.004 < np.sqrt((errors**2).mean()) < 0.009
    rounding = 1e-7 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(kept.rows(), np.float64), back_NW, rtol=rounding)


@pytest.fixture(
    scope="module",
    params=quick(slow=LAYERS),
)
def layer(request):
    """A layer that keeps an int8 cache, with all that pretrained models have where it can."""
    more = PRETRAINED if request.param in ("gqa", "mla-full-rank", "lrkv-full-groups") else {}
    model = small(ALL[request.param], layers=1, kv_cache_dtype="int8", **more)
    return random_model(model).blocks[0].attention


@pytest.fixture(scope="module")
def filled(layer):
    """(inputs, the cache of 2 sequences after 19 tokens in two pieces, their outputs)."""
    x_BTD = jnp.asarray(np.random.default_rng(1).standard_normal((2, 20, layer.config.width)), "f4")
    decode = jax.jit(lambda layer, x, cache, n: layer.decode(x, cache, n))
    cache = layer.init_cache(2, PAGE * PAGES, jnp.float32)
    many_BTD, cache = decode(layer, x_BTD[:, :17], cache, jnp.zeros(2, jnp.int32))
    few_BTD, cache = decode(layer, x_BTD[:, 17:19], cache, jnp.full(2, 17))
    return x_BTD, cache, jnp.concatenate([many_BTD, few_BTD], axis=1)


def test_what_is_read_is_what_the_rows_stand_for_wherever_they_lie(layer, filled):
    x_BTD, cache, _ = filled
    rng = np.random.default_rng(2)
    pages_BN = jnp.asarray(1 + rng.permutation(2 * PAGES).reshape(2, PAGES), jnp.int32)

    def paged(leaf, axis):
        """The same in pages of a pool that holds others' too, as the table names them."""
        slots = np.moveaxis(np.asarray(leaf), axis, 1)
        pool = np.full((2 * PAGES + 2, PAGE, *slots.shape[2:]), 77, leaf.dtype)
        pool[np.asarray(pages_BN).reshape(-1)] = slots.reshape(-1, *pool.shape[1:])
        return jnp.asarray(np.moveaxis(pool, 1, axis))

    pool = type(cache)(**{
        name: jax.tree.map(lambda leaf: paged(leaf, axis), getattr(cache, name))  # noqa: B023
        for name, axis in slot_axes(cache).items()
    })  # fmt: skip

    @jax.jit
    def read(layer, x_B1D, cache, pages_BN=None):
        positions_B1 = jnp.full((2, 1), 18)
        angles = layer.slot_angles(slots_of(cache, pages_BN))
        query = layer.queries(x_B1D, positions_B1)
        return layer.attend_cached(query, cache, positions_B1, angles, pages_BN)[0]

    x_B1D = x_BTD[:, 18:19]
    truth = read(layer, x_B1D, contiguous(cache, None))
    assert error(read(layer, x_B1D, cache), truth) <= 1e-6
    assert error(read(layer, x_B1D, pool, pages_BN), truth) <= 1e-6


def test_outputs_are_those_of_a_whole_cache_to_the_rounding_of_rows(layer, filled):
    x_BTD, cache, out_BTD = filled
    whole_BTD = jax.jit(lambda layer, x: layer(x, jnp.arange(19)[None]))(layer, x_BTD[:, :19])
    assert 1e-4 < error(out_BTD, whole_BTD) < 0.03
    kept = [leaf for leaf in jax.tree.leaves(cache) if leaf.dtype == jnp.int8]
    assert len(kept) == sum(getattr(cache, name) is not None for name in cache.INT8)


def test_what_cannot_be_kept_or_read_in_eight_bits_is_one_line():
    with pytest.raises(LrkvError, match="has no rows of heads to keep in eight bits"):
        small(LRKV(rank=0), kv_cache_dtype="int8")
    model = small(ALL["gqa"], layers=1, kv_cache_dtype="int8", decode_kernel="interpret")
    layer = random_model(model).blocks[0].attention
    x_B1D, lengths_B = jnp.ones((1, 1, model.width)), jnp.zeros(1, jnp.int32)
    with pytest.raises(LrkvError, match="it reads no int8 cache; use xla"):
        jax.eval_shape(layer.decode, x_B1D, layer.init_cache(1, 64, jnp.float32), lengths_B)
