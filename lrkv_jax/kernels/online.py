"""Softmax averages over a cache in plain XLA, a chunk of slots at a time (online softmax).

Memory is linear in the chunk, and time follows the longest sequence, not the cache's length
(Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867). On an accelerator a contiguous cache
is one chunk.

B batch  T queries  S cache slots  c slots of a chunk  X any axes between batch and T
"""

import re

import jax
import jax.numpy as jnp

from lrkv_jax.kernels.int8 import dequantized

# Finite, so that a difference of two of them is 0 and not NaN.
MASKED = -1e30
# On a CPU: the most bytes of a chunk's keys in float32, between the least slots and the most; of
# a sequence alone, whose slots are what XLA splits over threads, there may be more.
KEYS, LEAST, MOST, MOST_ALONE = 2 << 20, 128, 512, 2048
# On an accelerator: the slots of a chunk of pages, of which a copy is gathered.
GATHERED = 2048


def first_seen(lengths_B, T):
    """Position of each of T queries [B, T]: they are the last T of a sequence's tokens."""
    return lengths_B[:, None] - T + jnp.arange(T)


def is_small_batch(queries):
    """Whether a key has few queries: on a CPU, fewer than a chunk has slots."""
    return jax.default_backend() == "cpu" and queries < LEAST


def default_chunk(S, small_batch, values, pages_BN, single_sequence=False):
    """Slots of a chunk that stays in a CPU's cache; elsewhere all slots, or `GATHERED` of pages.

    `values` are those of a slot's keys over all sequences; many queries read a chunk often.
    With `single_sequence` one product reads the chunk, instead of a batch of them.
    """
    if jax.default_backend() != "cpu":
        return S if pages_BN is None else min(S, GATHERED)
    most = MOST_ALONE if small_batch and single_sequence else MOST
    fitting = min(most, KEYS // (4 * values)) if small_batch else most
    chunk = LEAST
    while 2 * chunk <= fitting:
        chunk *= 2
    return min(S, chunk)


def dots(subscripts, queries, cached, small_batch):
    """`einsum` of queries and cached keys in float32.

    XLA on a CPU copies the right operand of a batched product with its contraction outermost, and
    the left one row by row: for a small batch of queries, the cache is the left one. Where each key
    has one query, there is nothing to reuse, and products and sums read the cache in its order.
    """
    q, k, out = re.split(",|->", subscripts)
    if small_batch and _is_one(q, k, queries):
        return _products(q, k, out, queries, cached)
    if small_batch:
        q, k, queries, cached = k, q, cached, queries
    both = [axis for axis in out if axis in q and axis in k]
    free = [axis for side in (q, k) for axis in out if axis in side and axis not in both]
    product = "".join(both + free)
    result = _float32_einsum(f"{q},{k}->{product}", queries, cached)
    return result.transpose([product.index(axis) for axis in out])


def averages(subscripts, weights, cached, small_batch):
    """`einsum` of float32 weights and cached values in float32, each value read once."""
    w, v, out = re.split(",|->", subscripts)
    if small_batch and _is_one(w, v, weights):
        return _products(w, v, out, weights, cached)
    return _float32_einsum(subscripts, weights, cached)


def _float32_einsum(subscripts, left, cached):
    """`einsum` in float32: of operands in the cache's dtype, and on a CPU of float32 ones.

    XLA on a CPU with bfloat16 instructions has no batched product of bfloat16 that gives float32,
    and reports that only when it runs.
    """
    dtype = jnp.float32 if jax.default_backend() == "cpu" else cached.dtype
    operands = left.astype(dtype), cached.astype(dtype)
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


def _is_one(own, cached, array):
    """Whether `array` has one number for each of the cache's: its other axes are of size 1."""
    return all(size == 1 for axis, size in zip(own, array.shape, strict=True) if axis not in cached)


def _products(q, k, out, queries, cached):
    """`einsum`(`q`,`k`->`out`) as products in the cache's order, and then their sum.

    The barrier keeps the two apart: XLA on a CPU otherwise hands both to a library, which needs a
    copy of the chunk and of the queries, and takes about twice the time.
    """
    shape = [queries.shape[q.index(axis)] if axis in q else 1 for axis in k]
    shared = "".join(axis for axis in k if axis in q)
    own = "".join(axis for axis in q if axis not in k)
    moved = queries.astype(jnp.float32).transpose([q.index(axis) for axis in own + shared])
    product = jax.lax.optimization_barrier(moved.reshape(shape) * cached.astype(jnp.float32))
    sums = product.sum([i for i, axis in enumerate(k) if axis not in out])
    kept = own + "".join(axis for axis in k if axis in out)
    sums = sums.reshape(*[1] * len(own), *sums.shape)
    return sums.transpose([kept.index(axis) for axis in out])


def chunk_starts(S, chunk):
    """First slot of every chunk; the last chunk reaches back, so that all are of one size."""
    return [min(start, S - chunk) for start in range(0, S, chunk)]


def attend(logits_of, values_of, lengths_B, *, T, S, chunk, repeats=1, window=None):
    """Average cached values under softmax weights, over the slots that each query sees.

    logits_of(start) returns float32 [B, X, T, c], values_of(weights_BXTc, start, seen_Bc) a
    tuple of float32 [B, X, T, W]; `seen_Bc` marks the slots that a query of the sequence sees;
    other slots must not reach the sums. Query t sees slots up to `lengths_B` − T + t, with `window`
    only so many, the last ones; with `repeats`, T / repeats queries of each of so many heads follow
    one another.
    Returns the averages and the log-sum-exp [B, X, T]: 0 and MASKED for a query that sees nothing.
    """
    starts = chunk_starts(S, chunk)
    positions_BT = jnp.tile(first_seen(lengths_B, T // repeats), repeats)

    def some(index, carry):
        start = jnp.asarray(starts, jnp.int32)[index]
        logits = logits_of(start)
        slots_c = start + jnp.arange(chunk)
        # A last chunk that reaches back repeats slots of the one before.
        new_c = slots_c >= index * chunk
        seen_BTc = (slots_c <= positions_BT[:, :, None]) & new_c
        seen_Bc = (slots_c < lengths_B[:, None]) & new_c
        if window is not None:
            seen_BTc &= slots_c > positions_BT[:, :, None] - window
            seen_Bc &= slots_c > positions_BT[:, :1] - window
        seen = seen_BTc.reshape(-1, *[1] * (logits.ndim - 3), T, chunk)
        logits = jnp.where(seen, logits, MASKED)
        peak = logits.max(axis=-1)
        if carry is not None:
            peak = jnp.maximum(peak, carry[0])
        weights = jnp.where(seen, jnp.exp(logits - peak[..., None]), 0.0)
        total, sums = weights.sum(axis=-1), values_of(weights, start, seen_Bc)
        if carry is not None:
            decay = jnp.exp(carry[0] - peak)
            total = total + decay * carry[1]
            sums = tuple(
                new + decay[..., None] * old for new, old in zip(sums, carry[2], strict=True)
            )
        return peak, total, sums

    if len(starts) == 1:
        peak, total, sums = some(0, None)
    else:
        used = jnp.clip((lengths_B.max() + chunk - 1) // chunk, 1, len(starts))
        # The first chunk gives the carry its shapes; most sequences have no other.
        peak, total, sums = jax.lax.fori_loop(1, used, some, some(0, None))
    safe = jnp.where(total > 0, total, 1.0)
    log_sum = jnp.where(total > 0, peak + jnp.log(safe), MASKED)
    return tuple(value / safe[..., None] for value in sums), log_sum


def attend_factored(
    products, rotated, common_BSC, own_BSHR, inverse_norm_BHS, lengths_B, pages_BN, *,
    scale, T, H, widest, repeats, window,
):  # fmt: skip
    """`attend` over cached values that all heads share and, if they are there, those of each head.

    A logit is `scale` times its head's inverse norm, if there is one, times the sum of its parts:
    `dots` of each (subscripts, queries, cached keys) in `products`, and all slots' logits
    [S, B, T, H] in `rotated`. `widest` counts the values of a slot's widest keys.
    Returns the averages, [B, T, H, C] and perhaps [B, T, H, R], and the log-sum-exp [B, T, H].
    """
    B, S, small_batch = len(lengths_B), slots_of(common_BSC, pages_BN), is_small_batch(T * H)
    chunk = default_chunk(S, small_batch, B * widest, pages_BN, single_sequence=B == 1)

    def logits(start):
        parts = [
            dots(subscripts, queries, slots(cached, pages_BN, start, chunk), small_batch)
            for subscripts, queries, cached in products
        ]
        for logits_SBTH in rotated:
            some_cBTH = jax.lax.dynamic_slice_in_dim(logits_SBTH, start, chunk)
            parts.append(some_cBTH.transpose(1, 3, 2, 0))
        logits_BHTc = sum(parts[1:], parts[0])
        if inverse_norm_BHS is not None:
            norm_BHc = slots(inverse_norm_BHS, pages_BN, start, chunk, axis=2)
            logits_BHTc *= norm_BHc[:, :, None]
        return scale * logits_BHTc

    def values(weights_BHTc, start, seen_Bc):
        common_BcC = slots(common_BSC, pages_BN, start, chunk, seen_Bc)
        common_BHTC = averages("BHTc,BcC->BHTC", weights_BHTc, common_BcC, small_batch)
        if own_BSHR is None:
            return (common_BHTC,)
        own_BcHR = slots(own_BSHR, pages_BN, start, chunk, seen_Bc)
        return common_BHTC, averages("BHTc,BcHR->BHTR", weights_BHTc, own_BcHR, small_batch)

    sums, lse_BHT = attend(
        logits, values, lengths_B, T=T, S=S, chunk=chunk, repeats=repeats, window=window
    )
    return [value.swapaxes(1, 2) for value in sums], lse_BHT.swapaxes(1, 2)


def slots_of(array_BS, pages_BN):
    """S of a cache array [B, S, ...], or of its pool of pages [P, 64, ...]."""
    rows = array_BS.shape[1]
    return rows if pages_BN is None else rows * pages_BN.shape[1]


def slots(array_BS, pages_BN, start, chunk, seen_Bc=None, axis=1):
    """`chunk` slots from `start` of a cache array, or of its pool with a page table.

    `axis` is that of the slots: 1, or 2 in [B, H, S], whose pool is [P, H, 64]. Zeros where
    `seen_Bc` marks no token. Of pools, `start` and `chunk` are whole pages. Rows in
    eight bits are dequantized.
    """
    if pages_BN is None:
        some = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, start, chunk, axis), array_BS
        )
    else:
        rows = array_BS.shape[axis]
        pages_Bn = jax.lax.dynamic_slice_in_dim(pages_BN, start // rows, chunk // rows, 1)
        some = contiguous(array_BS, pages_Bn, axis)
    some = dequantized(some)
    if seen_Bc is None:
        return some
    return jnp.where(seen_Bc.reshape(*seen_Bc.shape, *[1] * (some.ndim - 2)), some, 0)


def contiguous(pool, pages_BN, slots_axis=1):
    """A copy of a cache array, [B, S, ...] or [B, H, S], from its pool of pages, [P, 64, ...]."""
    if pages_BN is None:
        return pool

    def joined(pool):
        pages = jnp.moveaxis(pool[pages_BN], 1, slots_axis)
        shape = pages.shape
        slots = shape[slots_axis] * shape[slots_axis + 1]
        return pages.reshape(*shape[:slots_axis], slots, *shape[slots_axis + 2 :])

    return jax.tree.map(joined, pool)


def padded(array, axis, width):
    """The array padded with zeros on `axis`, to `width`; None stays None."""
    if array is None or array.shape[axis] == width:
        return array
    extra = width - array.shape[axis]
    return jnp.pad(array, [(0, extra if axis == i else 0) for i in range(array.ndim)])


def as_queries(q_BTHW, groups):
    """Query heads of a group as further queries of one head, those of a head together."""
    B, T, H, W = q_BTHW.shape
    split_BTGNW = q_BTHW.reshape(B, T, groups, H // groups, W)
    return split_BTGNW.transpose(0, 3, 1, 2, 4).reshape(B, H // groups * T, groups, W)


def as_heads(found, repeats):
    """The inverse of `as_queries`, for results: [B, N T, G, ...] → [B, T, G N, ...]."""
    B, _, G, *rest = found.shape
    return by_head(jnp.moveaxis(found.reshape(B, repeats, -1, G, *rest), 3, 1))


def by_head(array_BGNT):
    """[B, G, N, T, ...] → [B, T, H, ...]."""
    B, G, N, T, *rest = array_BGNT.shape
    return jnp.moveaxis(array_BGNT.reshape(B, G * N, T, *rest), 1, 2)
