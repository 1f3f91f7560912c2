"""A 64-bit hash of an array's bits and their places, whatever devices hold them.

Each element is mixed with its index and the results are summed modulo 2^32: integers, so the order
of the sum, and with it the sharding, changes nothing. One changed element always shows, for the
mixing is a bijection; several hide from both sums with probability 2^-64.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def named(items: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `params/embedding`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(items)
    }


@jax.jit  # within another program, arrays of one shape share what is traced
def fingerprint(x: Array) -> UInt32[Array, "2"]:
    """The fingerprint of one array, whose elements have 1, 2, 4 or 8 bytes."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(x, _WORDS[min(4, x.dtype.itemsize)]).astype(jnp.uint32)
    index = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = index * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    first = _mix(bits ^ (index * np.uint32(0x9E3779B1)))
    second = (first ^ (first >> 15)) * (first | 1)
    return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


def _mix(x: Array) -> Array:
    """A bijection of 32 bits whose every output bit depends on every input bit (MurmurHash3's)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fingerprints(items: Any) -> UInt32[Array, "N 2"]:
    """The fingerprints of a tree's leaves, in order, computed on their devices; does not wait."""
    leaves = jax.tree.leaves(items)
    sharding = leaves[0].sharding
    everywhere = (
        NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, NamedSharding)
        else None
    )
    return _stacked(everywhere)(leaves)


@cache
def _stacked(out: NamedSharding | None):
    """The program for leaves on a mesh, whose every device gets the result."""
    return jax.jit(
        lambda leaves: jnp.stack([fingerprint(leaf) for leaf in leaves]), out_shardings=out
    )


def as_hex(words_N2: Any) -> list[str]:
    """Fingerprints as 16 hex digits each; waits for them."""
    return [f"{int(high):08x}{int(low):08x}" for high, low in np.asarray(words_N2)]
