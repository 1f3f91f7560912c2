"""The parts common to every variant's cache: which axis is which, how new tokens are written, and
how many queries attend to it.

A cache is a dataclass of arrays, some of them None. Its static `AXES` names the axes of each, as in
"batch slots head_width"; `on_mesh` splits them over a mesh by these names. Slot s of a sequence
holds its token at position s. Its static `INT8` names the arrays whose rows
`model.kv_cache_dtype=int8` keeps in eight bits (`lrkv_jax.kernels.int8`).

With a page table [B, N] the same dataclass is a pool: its batch are P pages, its slots the rows of
a page, and slot s of sequence b is row s % rows of page `pages_BN`[b, s // rows].

B batch  T new tokens  S slots  c slots of a tile  H heads  G key/value heads  W logit width
K head width  X = T · H / G  N pages of a sequence
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lrkv_jax.kernels import online
from lrkv_jax.kernels.int8 import Int8Rows, dequantized

Cache = Any
Pages = Int[Array, "B N"] | None

# Slots of a tile of prefill: memory is linear in T times this, whatever the cache's length.
PREFILL_TILE = 512
_NOWHERE = 2**31 - 1  # a page past any pool's last: what is written there is dropped


def slot_axes(cache: Cache) -> dict[str, int]:
    """The axis of slots of each array that the cache has."""
    there = (name for name, array in vars(cache).items() if array is not None)
    return {name: cache.AXES[name].split().index("slots") for name in there}


def slots_of(cache: Cache, pages_BN: Pages = None) -> int:
    """S, the tokens that one sequence has room for."""
    name, axis = next(iter(slot_axes(cache).items()))
    rows = getattr(cache, name).shape[axis]
    return rows if pages_BN is None else rows * pages_BN.shape[1]


def write(
    cache: Cache, new_kv: Cache, positions_BT: Int[Array, "B T"], pages_BN: Pages = None
) -> Cache:
    """Put each new token's keys and values into the slots that `positions_BT` names.

    A position past the last slot writes nothing; callers check lengths before they start.
    """
    rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
    if pages_BN is not None:
        rows, place_BT = slots_of(cache), positions_BT
        pages_BT = pages_BN.at[rows_B1, place_BT // rows].get(mode="fill", fill_value=_NOWHERE)
        rows_B1, positions_BT = pages_BT, place_BT % rows

    def put(name: str, axis: int) -> Array | Int8Rows:
        old, new = getattr(cache, name), getattr(new_kv, name).astype(getattr(cache, name).dtype)
        if axis == old.ndim - 1:
            # Indices split by a slice move to the front: the update is [B, T, H].
            return old.at[rows_B1, :, positions_BT].set(new.swapaxes(1, 2))
        new = online.padded(new, new.ndim - 1, old.shape[-1])
        if isinstance(old, Int8Rows):
            new = Int8Rows.of(new, old.dtype)
        return jax.tree.map(lambda old, new: old.at[rows_B1, positions_BT].set(new), old, new)

    return type(cache)(**{name: put(name, axis) for name, axis in slot_axes(cache).items()})


def contiguous(cache: Cache, pages_BN: Pages) -> Cache:
    """The cache of each sequence, gathered from its pages: for variants without a kernel."""
    axes = slot_axes(cache)
    arrays = {name: online.contiguous(getattr(cache, name), pages_BN, axes[name]) for name in axes}
    return type(cache)(**{name: dequantized(array) for name, array in arrays.items()})


def in_int8(shapes: Cache) -> Cache:
    """Abstract arrays as an int8 cache has them."""
    kept = {
        name: Int8Rows.shapes(array)
        for name, array in vars(shapes).items()
        if name in shapes.INT8 and array is not None
    }
    return replace(shapes, **kept)


def with_one(rows: Float[Array, "*B R"]) -> Float[Array, "*B Q"]:
    """Rows with a 1 appended to each: it multiplies a factor's last row, a bias."""
    return jnp.concatenate([rows, jnp.ones_like(rows[..., :1])], axis=-1)


def lengths_of(positions_BT: Int[Array, "B T"]) -> Int[Array, "B"]:
    """Tokens of each sequence, the new ones included: what the decode kernels count."""
    return positions_BT[:, -1] + 1


def near(
    cache: Cache, positions_BT: Int[Array, "B T"], window: int, pages_BN: Pages
) -> tuple[Cache, Pages, Int[Array, "B 1"]]:
    """The slots that tokens at `positions_BT` see through a window: (cache, pages, first_B1).

    Slot 0 of each sequence is there at position `first_B1`. Of pools the pages are the same, and
    the table is shorter: those before the window may be anybody's.
    """
    T, S = positions_BT.shape[1], slots_of(cache, pages_BN)
    first_B1 = jnp.maximum(positions_BT[:, :1] - window + 1, 0)
    if pages_BN is not None:
        rows = slots_of(cache)
        count = min((window + T + rows - 3) // rows + 1, pages_BN.shape[1])
        first_B1 = jnp.minimum(first_B1 // rows, pages_BN.shape[1] - count)
        some = jnp.take_along_axis(pages_BN, first_B1 + jnp.arange(count), axis=1)
        return cache, some, first_B1 * rows
    count = min(window + T - 1, S)
    first_B1 = jnp.minimum(first_B1, S - count)

    def cut(name, axis):
        def one(array, first):
            return jax.lax.dynamic_slice_in_dim(array, first, count, axis - 1)

        of = getattr(cache, name)
        return jax.tree.map(lambda array: jax.vmap(one)(array, first_B1[:, 0]), of)

    return type(cache)(**{n: cut(n, axis) for n, axis in slot_axes(cache).items()}), None, first_B1


def attend_tiles(
    q_BTHW, cache, materialize, lengths_B, *, scale, pages_BN=None, window=None, first_B1=0
):
    """Attend each sequence's last T tokens, at all its cached ones up to each, to `cache`.

    `materialize(some slots of the cache, their positions [B or 1, c])` gives keys [B, c, G, W] and
    values [B, c, G, K]. `lengths_B` counts the T tokens too. With `pages_BN` the cache is a pool.
    With a `window` a token sees so many, and slot 0 is at position `first_B1` (`near`), from which
    `lengths_B` counts. Returns float32 [B, T, H, K].
    """
    S = slots_of(cache, pages_BN)
    chunk = min(S, PREFILL_TILE)
    B, T, H, W = q_BTHW.shape
    f32 = {"preferred_element_type": jnp.float32}

    def keys_values(start):
        tile = {
            name: online.slots(getattr(cache, name), pages_BN, start, chunk, axis=axis)
            for name, axis in slot_axes(cache).items()
        }
        return materialize(type(cache)(**tile), first_B1 + (start + jnp.arange(chunk))[None])

    # As in `flash`: heads before positions, a group's queries in one axis, plain batched products.
    def logits(start):
        k_BcGW = keys_values(start)[0]
        G = k_BcGW.shape[2]
        q_BGXW = q_BTHW.swapaxes(1, 2).reshape(B, G, H // G * T, W)
        logits_BGXc = jnp.matmul(q_BGXW, k_BcGW.transpose(0, 2, 3, 1), **f32)
        return scale * logits_BGXc.reshape(B, H, T, chunk)

    def values(weights_BHTc, start, seen_Bc):
        v_BcGK = keys_values(start)[1]
        v_BcGK = jnp.where(seen_Bc[:, :, None, None], v_BcGK, 0)
        G = v_BcGK.shape[2]
        weights_BGXc = weights_BHTc.reshape(B, G, H // G * T, chunk).astype(v_BcGK.dtype)
        sums_BGXK = jnp.matmul(weights_BGXc, v_BcGK.swapaxes(1, 2), **f32)
        return (sums_BGXK.reshape(B, H, T, -1),)

    (out_BHTK,), _ = online.attend(logits, values, lengths_B, T=T, S=S, chunk=chunk, window=window)
    return out_BHTK.swapaxes(1, 2)
