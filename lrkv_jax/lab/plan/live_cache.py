"""Caches that are really allocated, and their live bytes: what a formula is held against.

A layer is abstract here: its cache is allocated, its weights are not.
"""

from dataclasses import dataclass
from typing import Any

from lrkv_jax.config import ModelConfig
from lrkv_jax.models.accounting.counts import CACHE_DTYPE

LIVE_SLOTS = 64  # enough that a cache padded in slots would show


@dataclass(frozen=True)
class LiveCache:
    """The caches of all layers, allocated for `batch` sequences of `length` tokens, and freed.

    `nbytes` sums the device buffers behind the arrays, a buffer that two of them share once.
    `live` is by how much the bytes of all live JAX arrays of the process grew meanwhile: a second
    witness, which would also see what the allocation left beside the cache.
    """

    batch: int
    length: int
    layers: int
    shapes: Any  # of one layer, as its `cache_shapes` are
    nbytes: int
    live: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of one sequence, over all layers."""
        return self.nbytes / (self.batch * self.length)


def measure_cache(
    model: ModelConfig, batch: int, length: int, dtype: str = CACHE_DTYPE
) -> LiveCache:
    """Allocate the caches that `model` decodes with, layer by layer as it does, and weigh them."""
    import jax
    import jax.numpy as jnp

    from lrkv_jax.models.attention import abstract_layer

    layer = abstract_layer(model)
    before = _live_bytes()
    caches = [layer.init_cache(batch, length, jnp.dtype(dtype)) for _ in range(model.layers)]
    leaves = jax.block_until_ready(jax.tree.leaves(caches))
    live = _live_bytes() - before
    shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    buffers = {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}
    shapes = layer.stored_shapes(batch, length, jnp.dtype(dtype))
    return LiveCache(batch, length, model.layers, shapes, sum(buffers.values()), live)


def live_cache_bytes_per_token(model: ModelConfig, dtype: str = CACHE_DTYPE) -> float:
    """Bytes of a layer's live buffers over the tokens they hold, times layers, from a small cache.

    One layer of `LIVE_SLOTS` tokens is enough: layers are alike, and no buffer grows otherwise than
    with its tokens. `measure_cache` allocates them all.
    """
    one = model.model_copy(update={"layers": 1})
    return model.layers * measure_cache(one, 1, LIVE_SLOTS, dtype).bytes_per_token


def _live_bytes() -> int:
    import jax

    return sum(array.nbytes for array in jax.live_arrays())
