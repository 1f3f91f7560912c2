"""Random arguments of the three decode kernels, and what they must give, in float64.

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
from lrkv_jax.kernels.latent_decode import PRIVATE_AXES, ROTATION_AXES
from lrkv_jax.kernels.lrkv_decode import RESIDUAL_AXES

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

    @property
    def axes(self):
        """The letters of the arrays' axes, as the kernels name them."""
        if self.kind == "grouped":
            return "BTHK", "BSGK", "BSGK"
        if self.kind == "lrkv":
            return "BTHK", "BSK", "BSK", self.arrays[3] and RESIDUAL_AXES, "BGS"
        rotation, private = self.arrays[4:]
        named = rotation and ROTATION_AXES, private and PRIVATE_AXES
        return "BTHX", "BTHP", "BSC", "BSP", *named

    def truth(self):
        """The definition in float64."""
        with jax.enable_x64(True):
            arrays = jax.tree.map(lambda array: np.asarray(array, np.float64), self.arrays)
            kernel = partial(getattr(reference, f"{self.kind}_decode"), scale=SCALE)
            return jax.tree.map(np.asarray, jax.jit(kernel)(*arrays, self.lengths_B))

    def astype(self, dtype):
        """The same with queries, caches and factors in `dtype`; norms and angles stay."""

        def cast(axes, array):
            return array if array is None or axes in ("BGS", "SK") else array.astype(dtype)

        return replace(self, arrays=jax.tree.map(cast, self.axes, self.arrays))

    def poisoned(self):
        """The same with NaN in every cache slot that no token has written."""

        def poison(array, slots_axis):
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

        def pool(array, slots_axis):
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

        def one(axes, array):
            cached = array is not None and "B" in axes and "S" in axes
            return change(array, axes.index("S")) if cached else array

        return jax.tree.map(one, self.axes, self.arrays)


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
