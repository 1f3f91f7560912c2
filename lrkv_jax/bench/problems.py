"""One layer's decode attention as data: random caches, queries, factors, and what to compute.

All variants solve the same problem: each head's query in (rotated and normed, where the variant
rotates it), each head's output out. Products with up-projections that a factored cache needs are
therefore inside the measurement, for MLA (absorption) as for LRKV.

B batch  T new tokens (1)  S cache slots  H heads  G key/value heads  K head width
C latent width  P rope-key width  R residual rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.attention import abstract_layer
from lrkv_jax.attention.grouped import GroupedCache
from lrkv_jax.attention.lrkv import LowRankCache
from lrkv_jax.attention.mla import LatentCache
from lrkv_jax.config import ModelConfig
from lrkv_jax.kernels import grouped_decode, latent_decode, lrkv_decode, reference
from lrkv_jax.nn.rope import rope_angles, rotate


@dataclass(frozen=True)
class Problem:
    """What to attend to. `cache` is the variant's own; `queries` and `factors` are named arrays."""

    model: ModelConfig
    kind: str  # of kernel: grouped, latent or lrkv
    cache: Any
    queries: dict[str, jax.Array]
    factors: dict[str, jax.Array]
    lengths_B: jax.Array
    scale: float

    @property
    def bytes_to_move(self) -> int:
        """Bytes of the live cache arrays up to each sequence's length, padding included."""
        return bytes_to_move(self.cache, np.asarray(self.lengths_B))


def bytes_to_move(cache: Any, lengths_B: np.ndarray) -> int:
    """Bytes of a cache's arrays in slots that hold a token: a decode step reads them once."""
    slots_last = getattr(cache, "SLOTS_LAST", ())
    total = 0
    for name, leaf in vars(cache).items():
        if leaf is not None:
            slots = leaf.shape[2] if name in slots_last else leaf.shape[1]
            total += leaf.nbytes // (leaf.shape[0] * slots) * int(lengths_B.sum())
    return total


def cache_nbytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Bytes of one cache of the problem, before it is made."""
    leaves = jax.tree.leaves(abstract_layer(model).cache_shapes(batch, length, jnp.dtype(dtype)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def lengths_of(batch: int, length: int, *, ragged: bool, seed: int) -> np.ndarray:
    """Tokens of each sequence: all `length`, or between 1 and that with a mean of half of it.

    Ragged lengths come in pairs that mirror each other around the half, so that the mean is exact
    in every draw and figures of different seeds compare.
    """
    if not ragged:
        return np.full(batch, length, np.int32)
    rng = np.random.default_rng(seed)
    half = rng.integers(1, length, batch // 2, endpoint=True)
    middle = [-(-length // 2)] * (batch % 2)
    lengths = np.concatenate([half, np.maximum(length - half, 1), middle])
    return rng.permutation(lengths).astype(np.int32)


def make_problem(
    model: ModelConfig, lengths_B: np.ndarray, length: int, dtype: str, seed: int
) -> Problem:
    """Random arrays of unit variance: logits of standard deviation about 1, weights far from equal.

    LRKV's residual carries half of a key's variance, so that leaving it out cannot go unnoticed.
    """
    layer = abstract_layer(model)
    shapes = layer.cache_shapes(len(lengths_B), length, jnp.dtype(dtype))
    kinds = {GroupedCache: "grouped", LatentCache: "latent", LowRankCache: "lrkv"}

    @jax.jit  # one program for all arrays: most of a small sweep is compilation
    def make(seed):
        seeds = iter([1000 * seed + i for i in range(16)])
        cache = {
            name: noise(leaf.shape, leaf.dtype, next(seeds))
            for name, leaf in vars(shapes).items()
            if leaf is not None
        }
        queries, factors = _queries_and_factors(model, seeds, len(lengths_B), length, dtype)
        if "inverse_norm_BHS" in cache:
            cache["inverse_norm_BHS"] = 0.7 + 0.1 * cache["inverse_norm_BHS"]
        for name in {"rk_BSHR", "rv_BSHR"} & set(cache):
            filled = jnp.arange(cache[name].shape[-1]) < model.attention.rank
            cache[name] = jnp.where(filled, cache[name], 0)
        return type(shapes)(**cache), queries, factors

    made = make(jnp.uint32(seed))
    return Problem(model, kinds[type(shapes)], *made, jnp.asarray(lengths_B), layer.scale)


def _queries_and_factors(model, seeds, B, length, dtype):
    """Named arrays: one token's queries, and the projections that a factored cache needs."""
    H, K, entry = model.heads, model.head_width, model.attention
    queries, factors = {"q_BTHK": noise((B, 1, H, K), dtype, next(seeds))}, {}
    if entry.kind == "mla":
        C, P = entry.latent, entry.rope_width
        queries["q_BTHP"] = noise((B, 1, H, P), dtype, next(seeds))
        for name in ("up_key_CHK", "up_value_CHK"):
            factors[name] = noise((C, H, K), dtype, next(seeds), C**-0.5)
    if entry.kind == "lrkv" and entry.rank:
        R = entry.rank
        queries["unrotated_BTHK"] = noise((B, 1, H, K), dtype, next(seeds))
        for name in ("up_key_HRK", "up_value_HRK"):
            factors[name] = noise((H, R, K), dtype, next(seeds), R**-0.5)
        cos_sin = rope_angles(jnp.arange(length), K, model.rope_base)
        factors["angles_SK"] = jnp.concatenate(cos_sin, axis=-1)
    return queries, factors


def noise(shape: tuple[int, ...], dtype: str, seed, std: float = 1.0) -> jax.Array:
    """Uniform numbers of mean 0: murmur3's finaliser over each value's index.

    A large cache is 10⁹ values and a small sweep is mostly compilation: JAX's generators cost
    several times as much of both.
    """
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(seed) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    bits = bits ^ (bits >> 16)
    unit = (bits >> 8).astype(jnp.float32) * 2.0**-24
    return (std * 3**0.5 * (2 * unit - 1)).astype(dtype).reshape(shape)


def kernel_arguments(problem: Problem, queries, factors, cache, lengths_B) -> tuple:
    """The kernel's arrays, before the lengths: queries moved to where the cache can meet them."""
    q_BTHK = queries["q_BTHK"]
    if problem.kind == "grouped":
        return q_BTHK, cache.k_BSGK, cache.v_BSGK
    if problem.kind == "latent":
        q_BTHC = jnp.einsum("BTHK,CHK->BTHC", q_BTHK, factors["up_key_CHK"])
        return q_BTHC, queries["q_BTHP"], cache.latent_BSC, cache.rope_key_BSP
    residual = None
    if factors:
        residual = lrkv_decode.Residual(cache.rk_BSHR, cache.rv_BSHR, factors["up_value_HRK"])
        if problem.model.attention.rope == "full":
            residual = residual._replace(
                up_key_HRK=factors["up_key_HRK"], angles_SK=factors["angles_SK"]
            )
        else:
            q_BTHR = _latent_query(problem, queries, factors, lengths_B)
            residual = residual._replace(q_latent_BTHR=q_BTHR)
    return q_BTHK, cache.k_shared_BSK, cache.v_shared_BSK, residual, cache.inverse_norm_BHS


def _latent_query(problem, queries, factors, lengths_B):
    q_BTHR = jnp.einsum("BTHK,HRK->BTHR", queries["unrotated_BTHK"], factors["up_key_HRK"])
    if problem.model.attention.rope != "latent":
        return q_BTHR
    positions_B1 = lengths_B[:, None] - 1
    cos, sin = rope_angles(positions_B1, q_BTHR.shape[-1], problem.model.rope_base)
    return rotate(q_BTHR, cos[:, :, None], sin[:, :, None])


def head_outputs(problem: Problem, out_BTHW, factors):
    """[B, T, H, K] from what the kernel returns: MLA's is still in the latent."""
    if problem.kind != "latent":
        return out_BTHW
    up_CHK = factors["up_value_CHK"]
    return jnp.einsum("BTHC,CHK->BTHK", out_BTHW.astype(up_CHK.dtype), up_CHK)


def with_kernel(problem: Problem, queries, factors, cache, lengths_B, impl: str):
    """(outputs [B, T, H, K], log-sum-exp) through this project's kernel."""
    kernels = {
        "grouped": grouped_decode.grouped_decode,
        "latent": latent_decode.latent_decode,
        "lrkv": lrkv_decode.lrkv_decode,
    }
    arrays = kernel_arguments(problem, queries, factors, cache, lengths_B)
    out, lse = kernels[problem.kind](*arrays, lengths_B, scale=problem.scale, impl=impl)
    return head_outputs(problem, out, factors), lse


def with_oracle(problem: Problem, queries, factors, cache, lengths_B):
    """The same from the float32 oracle, every product at the highest precision."""
    queries, factors, cache = jax.tree.map(
        lambda a: a.astype(jnp.float32), (queries, factors, cache)
    )
    with jax.default_matmul_precision("highest"):
        arrays = kernel_arguments(problem, queries, factors, cache, lengths_B)
        oracle = getattr(reference, f"{problem.kind}_decode")
        out, lse = oracle(*arrays, lengths_B, scale=problem.scale)
        return head_outputs(problem, out, factors), lse


def materialised(problem: Problem, queries, factors, cache, lengths_B):
    """Queries, and keys and values of every head rebuilt from a factored cache: [B, S, H, ...]."""
    q_BTHK = queries["q_BTHK"]
    dtype, H = q_BTHK.dtype, q_BTHK.shape[2]
    if problem.kind == "latent":
        k_BSHK = jnp.einsum("BSC,CHK->BSHK", cache.latent_BSC, factors["up_key_CHK"])
        v_BSHK = jnp.einsum("BSC,CHK->BSHK", cache.latent_BSC, factors["up_value_CHK"])
        rope_BSP = cache.rope_key_BSP
        rope_BSHP = jnp.repeat(rope_BSP[:, :, None], H, axis=2)
        q_BTHX = jnp.concatenate([q_BTHK, queries["q_BTHP"]], axis=-1)
        return q_BTHX, jnp.concatenate([k_BSHK, rope_BSHP], axis=-1), v_BSHK
    k_BSHK, v_BSHK = (
        jnp.repeat(a[:, :, None], H, axis=2) for a in (cache.k_shared_BSK, cache.v_shared_BSK)
    )
    if factors:
        R = factors["up_value_HRK"].shape[1]
        rk_BSHR, rv_BSHR = cache.rk_BSHR[..., :R], cache.rv_BSHR[..., :R]
        v_BSHK = v_BSHK + jnp.einsum("BSHR,HRK->BSHK", rv_BSHR, factors["up_value_HRK"])
        if problem.model.attention.rope == "full":
            residual_BSHK = jnp.einsum("BSHR,HRK->BSHK", rk_BSHR, factors["up_key_HRK"])
            cos_SJ, sin_SJ = jnp.split(factors["angles_SK"], 2, axis=-1)
            k_BSHK = k_BSHK + rotate(residual_BSHK, cos_SJ[:, None], sin_SJ[:, None])
        else:
            q_BTHR = _latent_query(problem, queries, factors, lengths_B)
            q_BTHK = jnp.concatenate([q_BTHK, q_BTHR], axis=-1)
            k_BSHK = jnp.concatenate([k_BSHK, rk_BSHR], axis=-1)
    if cache.inverse_norm_BHS is not None:
        k_BSHK = k_BSHK * cache.inverse_norm_BHS.swapaxes(1, 2)[..., None]
    return q_BTHK, k_BSHK.astype(dtype), v_BSHK.astype(dtype)
