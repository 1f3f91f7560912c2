"""Random arguments of the three decode kernels, and what they must give, in float64 numpy.

Arguments are numpy's: each operation on a JAX array would be a program to compile, for every shape.

B batch  T queries  S cache slots  H heads  G key/value heads  K head width  R residual rank
C latent width  P rope-key width
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import reference

from lrkv_jax import kernels

MASKED = -1e30
SCALE = 0.6


@dataclass(frozen=True)
class Case:
    """One call: `arrays` are the kernel's positional arguments before the lengths."""

    kind: str
    arrays: tuple
    lengths_B: np.ndarray
    pages_BN: Any = None  # the page table where the caches are pools of pages

    def program(self, **how):
        """The jitted kernel, for cases of one shape to share."""
        kernel = getattr(kernels, f"{self.kind}_decode")
        return jax.jit(partial(kernel, scale=SCALE, **how))

    def run(self, program=None, **how):
        """The kernel's (output, log-sum-exp), by `program` or by one of its own."""
        program = program or self.program(**how)
        return program(*self.arrays, jnp.asarray(self.lengths_B), pages_BN=self.pages_BN)

    def oracle(self):
        """The float32 oracle's."""
        kernel = partial(getattr(reference, f"{self.kind}_decode"), scale=SCALE)
        return jax.jit(kernel)(*self.arrays, jnp.asarray(self.lengths_B))

    def truth(self):
        """The definition in float64."""
        arrays = jax.tree.map(lambda a: np.asarray(a.astype(jnp.float32), np.float64), self.arrays)
        q_BTHX, k_BSHX, v_BSHW, norm_BSH = _materialized(self.kind, arrays)
        out = np.zeros((*q_BTHX.shape[:3], v_BSHW.shape[-1]))
        lse = np.full(q_BTHX.shape[:3], MASKED)
        T = q_BTHX.shape[1]
        for b, t, h in np.ndindex(q_BTHX.shape[:3]):
            n = self.lengths_B[b] - T + t + 1
            if n <= 0:
                continue
            logits = SCALE * norm_BSH[b, :n, h] * (k_BSHX[b, :n, h] @ q_BTHX[b, t, h])
            weights = np.exp(logits - logits.max())
            lse[b, t, h] = logits.max() + np.log(weights.sum())
            out[b, t, h] = weights @ v_BSHW[b, :n, h] / weights.sum()
        return out, lse

    def astype(self, dtype):
        """The same with queries, caches and factors in `dtype`; norms and angles stay."""
        if self.kind == "lrkv":
            q, k, v, residual, norm = (
                jax.tree.map(lambda a: a.astype(dtype), self.arrays[:4]) + self.arrays[4:]
            )
            if residual is not None:
                residual = residual._replace(angles_SK=self.arrays[3].angles_SK)
            return replace(self, arrays=(q, k, v, residual, norm))
        arrays = jax.tree.map(lambda a: a.astype(dtype), self.arrays)
        if self.kind == "latent" and (kept := self.arrays[4]):
            own = {"angles_SK": kept.angles_SK, "inverse_norm_BGS": kept.inverse_norm_BGS}
            arrays = (*arrays[:4], arrays[4]._replace(**own), arrays[5])
        return replace(self, arrays=arrays)

    def poisoned(self):
        """The same with NaN in every cache slot that no token has written."""

        def poison(array, slots_axis=1):
            slots = np.arange(array.shape[slots_axis])
            unseen = slots >= np.maximum(self.lengths_B, 0)[:, None]
            shape = [1] * array.ndim
            shape[0], shape[slots_axis] = unseen.shape
            return np.where(unseen.reshape(shape), array.dtype.type(np.nan), array)

        return replace(self, arrays=self._cached(poison))

    def paged(self, seed=0):
        """The same with pools of pages in place of the caches: permuted, among others of NaN.

        What lies past a sequence's last page is another's page, or page 0.
        """
        rng, B = np.random.default_rng(seed), len(self.lengths_B)
        S = self.arrays[1 if self.kind != "latent" else 2].shape[1]
        N, foreign = S // 64, 3
        pages_BN = rng.permutation(B * N + foreign)[: B * N].reshape(B, N)

        def pool(array, slots_axis=1):
            shape = array.shape
            pages = array.reshape(*shape[:slots_axis], N, 64, *shape[slots_axis + 1 :])
            pages = np.moveaxis(pages, slots_axis, 1)
            pools = np.full((B * N + foreign, *pages.shape[2:]), np.nan, array.dtype)
            pools[pages_BN] = pages
            return pools

        used = np.arange(N) * 64 < self.lengths_B[:, None]
        anything = rng.choice([0, pages_BN[0, 0]], (B, N))
        table = np.int32(np.where(used, pages_BN, anything))
        return replace(self, arrays=self._cached(pool), pages_BN=table)

    def _cached(self, change):
        """The arrays, those of the cache changed by `change`(array, the axis of its slots)."""
        if self.kind == "grouped":
            q, *cache = self.arrays
            return (q, *map(change, cache))
        if self.kind == "latent":
            q, q_rope, latent, rope_key, rotation, private = self.arrays
            if private is not None:
                private = private._replace(latent_BSGR=change(private.latent_BSGR))
            if rotation is None:
                return (q, q_rope, change(latent), change(rope_key), None, private)
            if rotation.inverse_norm_BGS is not None:
                norm = change(rotation.inverse_norm_BGS, 2)
                rotation = rotation._replace(inverse_norm_BGS=norm)
            return (q, None, change(latent), None, rotation, private)
        q, k, v, residual, norm = self.arrays
        if residual is not None:
            residual = residual._replace(
                rk_BSGR=change(residual.rk_BSGR), rv_BSGR=change(residual.rv_BSGR)
            )
        norm = None if norm is None else change(norm, 2)
        return (q, change(k), change(v), residual, norm)


def _materialized(kind, arrays):
    """Queries, keys and values of every head, and the factor on each logit."""
    if kind == "grouped":
        q, k, v = arrays
        repeats = q.shape[2] // k.shape[2]
        k, v = np.repeat(k, repeats, axis=2), np.repeat(v, repeats, axis=2)
        return q, k, v, np.ones(k.shape[:3])
    if kind == "latent":
        q, q_rope, latent, rope, rotation, private = arrays
        if private is not None:
            return _materialized_private(*arrays)
        v = np.repeat(latent[:, :, None], q.shape[2], axis=2)
        if rotation is None:
            k = np.concatenate([latent, rope], axis=-1)[:, :, None]
            k = np.repeat(k, q.shape[2], axis=2)
            return np.concatenate([q, q_rope], axis=-1), k, v, np.ones(k.shape[:3])
        repeats = q.shape[2] // rotation.up_key_CGK.shape[1]
        up_CHK = np.repeat(rotation.up_key_CGK, repeats, axis=1)
        k = _rotated(np.einsum("BSC,CHK->BSHK", latent, up_CHK), rotation.angles_SK)
        norm = rotation.inverse_norm_BGS
        if norm is not None:
            norm = np.repeat(norm, repeats, axis=1).swapaxes(1, 2)
        return q, k, v, np.ones(k.shape[:3]) if norm is None else norm
    q, k, v, residual, norm = arrays
    H = q.shape[2]
    k, v = np.repeat(k[:, :, None], H, axis=2), np.repeat(v[:, :, None], H, axis=2)
    norm = (
        np.ones(k.shape[:3])
        if norm is None
        else np.repeat(norm, H // norm.shape[1], axis=1).swapaxes(1, 2)
    )
    if residual is None:
        return q, k, v, norm
    R, repeats = residual.up_value_GRK.shape[1], H // residual.rk_BSGR.shape[2]
    rk, rv = (np.repeat(r[..., :R], repeats, axis=2) for r in (residual.rk_BSGR, residual.rv_BSGR))
    v = v + np.einsum("BSHR,HRK->BSHK", rv, np.repeat(residual.up_value_GRK, repeats, axis=0))
    if residual.q_latent_BTHR is not None:
        q = np.concatenate([q, residual.q_latent_BTHR], axis=-1)
        return q, np.concatenate([k, rk], axis=-1), v, norm
    up_key_HRK = np.repeat(residual.up_key_GRK, repeats, axis=0)
    residual_key = np.einsum("BSHR,HRK->BSHK", rk, up_key_HRK)
    return q, k + _rotated(residual_key, residual.angles_SK), v, norm


def _materialized_private(q, q_rope, latent, rope, rotation, private):
    """The same where heads have latents of their own: keys as the sum of what either makes."""
    H = q.shape[2]
    repeats = H // private.latent_BSGR.shape[2]
    own = np.repeat(private.latent_BSGR, repeats, axis=2)
    common = np.repeat(latent[:, :, None], H, axis=2)
    v, norm = np.concatenate([common, own], axis=-1), np.ones(common.shape[:3])
    if rotation is not None and rotation.inverse_norm_BGS is not None:
        norm = np.repeat(rotation.inverse_norm_BGS, repeats, axis=1).swapaxes(1, 2)
    if private.up_key_GRK is not None:
        up_HRK = np.repeat(private.up_key_GRK, repeats, axis=0)
        up_CHK = np.repeat(rotation.up_key_CGK, repeats, axis=1)
        k = np.einsum("BSC,CHK->BSHK", latent, up_CHK) + np.einsum(
            "BSHR,HRK->BSHK", own[..., : up_HRK.shape[1]], up_HRK
        )
        return q, _rotated(k, rotation.angles_SK), v, norm
    own = own[..., : private.q_BTHR.shape[-1]]
    k = [common, own, np.repeat(rope[:, :, None], H, axis=2)]
    q = np.concatenate([q, private.q_BTHR, q_rope], axis=-1)
    return q, np.concatenate(k, axis=-1), v, norm


def _rotated(key_BSHK, angles_SK):
    """Each pair as a complex number, times its slot's; an odd last coordinate stays."""
    J = angles_SK.shape[-1] // 2
    turn = angles_SK[:, None, :J] + 1j * angles_SK[:, None, J:]
    pairs = (key_BSHK[..., :J] + 1j * key_BSHK[..., J : 2 * J]) * turn
    return np.concatenate([pairs.real, pairs.imag, key_BSHK[..., 2 * J :]], axis=-1)


def angles(slots, width, turns_J=None):
    """[cos, sin] of each slot's position, for the pairs of a key `width` wide."""
    if turns_J is None:
        turns_J = 10_000.0 ** (-2 * np.arange(width // 2) / width)
    angles_SJ = np.arange(slots)[:, None] * np.asarray(turns_J)
    return np.float32(np.concatenate([np.cos(angles_SJ), np.sin(angles_SJ)], -1))


def normal(rng, *shape):
    return np.float32(rng.standard_normal(shape))


def grouped_case(lengths, *, T=1, S=None, H=4, G=2, K=64, seed=0):
    rng, B, S = np.random.default_rng(seed), len(lengths), S or max(1, *lengths)
    arrays = (normal(rng, B, T, H, K) / K**0.25, normal(rng, B, S, G, K), normal(rng, B, S, G, K))
    return Case("grouped", arrays, np.array(lengths))


def latent_case(lengths, mode="decoupled", *, T=1, S=None, H=4, G=None, K=64, C=64, P=64,
                norm=True, seed=0):  # fmt: skip
    """K is the heads' width, and G their groups, of mode `full` alone; P is of `decoupled`."""
    rng, B, S = np.random.default_rng(seed), len(lengths), S or max(1, *lengths)
    if mode == "full":
        q, latent = normal(rng, B, T, H, K) / K**0.25, normal(rng, B, S, C)
        norms = np.float32(rng.uniform(0.5, 1.5, (B, G or H, S))) if norm else None
        up_key = normal(rng, C, G or H, K) / C**0.5
        rotation = kernels.Rotation(angles(S, K), up_key, norms)
        return Case("latent", (q, None, latent, None, rotation, None), np.array(lengths))
    q, q_rope = normal(rng, B, T, H, C) / C**0.25, normal(rng, B, T, H, P) / max(P, 1) ** 0.25
    return Case(
        "latent",
        (q, q_rope, normal(rng, B, S, C), normal(rng, B, S, P), None, None),
        np.array(lengths),
    )


def private_case(lengths, mode, *, T=1, S=None, H=4, G=2, K=16, R=5, seed=0):
    """A latent of all heads, and those of G groups of heads beside it, in each mode."""
    rng, B, S = np.random.default_rng(seed), len(lengths), S or max(1, *lengths)
    case = latent_case(lengths, mode, T=T, S=S, H=H, G=G, K=K, C=K, P=8, seed=seed)
    latents = np.pad(normal(rng, B, S, G, R), [(0, 0), (0, 0), (0, 0), (0, -R % 8)])
    if mode == "full":
        private = kernels.Private(latents, up_key_GRK=normal(rng, G, R, K) / (2 * R**0.5))
    else:
        private = kernels.Private(latents, normal(rng, B, T, H, R) / R**0.25)
    return replace(case, arrays=(*case.arrays[:5], private))


def lrkv_case(
    lengths, mode="full", *, T=1, S=None, H=4, G=None, K=64, R=5, norm=True, seed=0, turns_J=None
):
    """Latents padded as a cache pads them, the residual about half of each logit's spread.

    `turns_J` are the angles per position, RoPE's own unless given.
    """
    rng, B, S = np.random.default_rng(seed), len(lengths), S or max(1, *lengths)
    q = normal(rng, B, T, H, K) / K**0.25
    k, v = normal(rng, B, S, K), normal(rng, B, S, K)
    G = (G or H) if R else 1
    inverse_norm = np.float32(rng.uniform(0.5, 1.5, (B, G, S))) if norm else None
    if not R:
        return Case("lrkv", (q, k, v, None, inverse_norm), np.array(lengths))
    pad = [(0, 0), (0, 0), (0, 0), (0, -R % (8 if R <= 64 else 64))]
    rk, rv = (np.pad(normal(rng, B, S, G, R), pad) for _ in range(2))
    residual = kernels.Residual(rk, rv, normal(rng, G, R, K) / (2 * R**0.5))
    if mode == "full":
        residual = residual._replace(
            up_key_GRK=normal(rng, G, R, K) / (2 * R**0.5), angles_SK=angles(S, K, turns_J)
        )
    else:
        residual = residual._replace(q_latent_BTHR=normal(rng, B, T, H, R) / R**0.25)
    return Case("lrkv", (q, k, v, residual, inverse_norm), np.array(lengths))


def compare(result, truth):
    """Largest error of outputs over their scale, and of log-sum-exps over max(1, |lse|)."""
    (out, lse), (expected, expected_lse) = result, truth
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    expected, expected_lse = np.asarray(expected, np.float64), np.asarray(expected_lse, np.float64)
    assert out.shape == expected.shape and lse.shape == expected_lse.shape
    scale = max(np.abs(expected).max(), 1e-3)
    worst_lse = np.abs(lse - expected_lse) / np.maximum(1, np.abs(expected_lse))
    return float(np.abs(out - expected).max() / scale), float(worst_lse.max())
