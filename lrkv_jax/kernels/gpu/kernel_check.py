"""One check of a compiled decode kernel against XLA, in this process, before its first use.

`dispatch` calls `failure_reason` before it takes the Mosaic kernel for a family of calls.
A family is all that the kernel's code depends on: heads, widths, dtypes, queries, scale and plan.
Batch and cache length are not in it. The check has another batch and cache: in 16 and 32 bits
they take up to 1.6 GB of the device's memory for a moment (6.3B). Where a kernel hangs, its device
is lost to the process: the check ends in an error then, and `decode_kernel: xla` does without both.

B sequences  T queries  S cache slots  H heads  K head width  J = K / 2 frequency pairs
N pages of a sequence
"""

from __future__ import annotations

import functools
import threading
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.angles import frequencies
from lrkv_jax.kernels.gpu.schedule import TILE

# Largest difference over the largest output of the same sequence, or of a log-sum-exp. Weights are
# rounded to bfloat16, by up to 2⁻⁹ = 2e-3; the interpreted kernels differ by 4e-4 to 1.8e-3.
TOLERANCE = 5e-3
SECONDS = 120  # of a check: with its compilation it took 5 to 13 on an H200 that did more


@dataclass(frozen=True)
class KernelCall:
    """A call of a decode kernel, with the batch, lengths and pages of the check.

    `mosaic(plan, *arrays, lengths, scale, interpret)` must equal `xla(*arrays, lengths, scale)`.
    `arrays` are shapes and dtypes, and `axes` the letters of their axes. The last array is the page
    table or None; with one, arrays with both B and S are pools of pages.
    """

    mosaic: Any
    xla: Any
    plan: Any
    axes: Any
    arrays: Any
    lengths: tuple[int, ...]
    slots: int
    scale: float

    @classmethod
    def of(cls, mosaic, xla, plan, axes, arrays, scale) -> KernelCall:
        """The check's call of the family of a call with these arrays."""
        lengths, slots = ragged(plan)
        B, pages = len(lengths), slots // TILE
        size, pool = {"B": B, "S": slots, "N": pages}, {"B": 1 + B * pages, "S": TILE}

        def like(names, array):
            if array is None:
                return None
            paged = arrays[-1] is not None and "B" in names and "S" in names
            sizes = size | pool if paged else size
            shape = [sizes.get(name, n) for name, n in zip(names, array.shape, strict=True)]
            return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

        shapes = jax.tree.map(like, axes, arrays)
        return cls(mosaic, xla, plan, axes, shapes, lengths, slots, scale)

    def __str__(self) -> str:
        """The dtypes and shapes of the arrays, as in bfloat16[8,1,4,64]."""
        leaves = jax.tree.leaves(self.arrays)
        return " ".join(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves)


def ragged(plan) -> tuple[tuple[int, ...], int]:
    """(lengths of the check's sequences, slots of its cache).

    Every worker's run of tiles is longer than its ring, so that slots are used again, and workers
    begin inside sequences and cross into the next. There are an empty sequence, one shorter than 8
    queries, full tiles and partial ones.
    """
    tiles = plan.workers * (-(-plan.ring // plan.tile_slots) + 3)
    most = max(2, -(-tiles // 4))
    a, b, c, d = most * TILE, (most - 1) * TILE + 1, most * TILE - 27, most * TILE + 5
    return (a, 3, b, 0, TILE, c, 2 * TILE + 2, d), (most + 1) * TILE


@functools.cache
def failure_reason(call: KernelCall) -> str | None:
    """The reason why the kernel must not run here, in one line; None if it gives XLA's results.

    The first question about a family compiles and runs both, which takes seconds. Raises
    `LrkvError` where that does not end.
    """
    device = jax.local_devices()[0].device_kind
    found: futures.Future[str | None] = futures.Future()
    # The caller is being traced, perhaps for a mesh: another thread knows of neither.
    threading.Thread(target=lambda: found.set_result(_compare(call)), daemon=True).start()
    try:
        reason = found.result(SECONDS)
    except TimeoutError:
        raise LrkvError(
            f"the compiled kernel hangs in its check on this {device} with {call}: set "
            "model.decode_kernel = xla, and please report this line"
        ) from None
    if reason is None:
        return None
    return (
        f"the compiled kernel failed its check on this {device} with {call}: {reason}; "
        "please report this line"
    )


def _compare(call):
    """The reason why the kernel is not XLA's equal, or None."""
    # A CPU, in tests, can compile no kernel.
    interpret = jax.default_backend() == "cpu"
    try:
        # Of an argument: XLA would fold a constant.
        arrays, lengths_B = jax.jit(partial(problem, call))(0)
        got = jax.jit(partial(call.mosaic, call.plan, scale=call.scale, interpret=interpret))(
            *arrays, lengths_B=lengths_B
        )
        off = float(error(got, _in_float32(call, arrays, lengths_B)))
    except Exception as failure:  # a kernel may raise anything
        text = " ".join(str(failure).split())
        return f"it fails with {type(failure).__name__}: {text}"[:300]
    if off == float("inf"):
        return "it gives values that are not numbers"
    if off > TOLERANCE:
        return f"it differs from XLA by {off:.1e} of the largest value, {TOLERANCE:.0e} allowed"
    return None


def problem(call: KernelCall, seed) -> tuple[Any, jax.Array]:
    """Random arrays of unit variance, NaN in the slots past each sequence's length; the lengths.

    The pages of the sequences are in their pools in reverse order, after page 0: that one is NaN,
    and all tables point to it past their sequences' last pages.
    """
    lengths_B = jnp.array(call.lengths, jnp.int32)
    past_BS = jnp.arange(call.slots) >= lengths_B[:, None]
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    paged = call.arrays[-1] is not None

    def make(names, leaf):
        if leaf is None:
            return None
        if names == "BN":
            pages_BN = jnp.arange(leaf.size, 0, -1).reshape(leaf.shape)
            return jnp.where(past_BS[:, ::TILE], 0, pages_BN).astype(jnp.int32)
        if names == "SK":
            return _angles(*leaf.shape)
        size = {"B": len(call.lengths), "S": call.slots}
        shape = [size.get(name, n) for name, n in zip(names, leaf.shape, strict=True)]
        array = jax.random.normal(next(keys), shape, jnp.float32)
        if "B" not in names:  # a factor: its products keep the variance
            # Values that bfloat16 has: the kernel rounds B_h to it by design, and XLA does not,
            # which on a GPU removes a conversion there and back.
            array = lax.reduce_precision(array * leaf.shape[-2] ** -0.5, 8, 7)
        elif "S" in names:
            others = [axis for axis, name in enumerate(names) if name not in "BS"]
            array = jnp.where(jnp.expand_dims(past_BS, others), jnp.nan, array)
            if paged:
                array = _pool(array, names.index("S"))
        return array.astype(leaf.dtype)

    return jax.tree.map(make, call.axes, call.arrays), lengths_B


def _pool(array, slots_axis):
    """The array's pages in reverse order, after one of NaN."""
    pages = jnp.moveaxis(array, slots_axis, 1)
    pages = pages.reshape(-1, TILE, *pages.shape[2:])[::-1]
    empty = jnp.full((1, *pages.shape[1:]), jnp.nan)
    return jnp.moveaxis(jnp.concatenate([empty, pages]), 1, slots_axis)


def _angles(slots, width):
    """[cos, sin] of each slot's position, at RoPE's usual base."""
    angle_SJ = jnp.arange(slots)[:, None] * jnp.array(frequencies(width))
    return jnp.concatenate([jnp.cos(angle_SJ), jnp.sin(angle_SJ)], axis=-1)


def _in_float32(call, arrays, lengths_B):
    """What XLA gives for the same values, in float32."""

    def exact(array):
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(jnp.float32) if floating else array

    with jax.default_matmul_precision("highest"):
        return jax.jit(partial(call.xla, scale=call.scale))(
            *jax.tree.map(exact, arrays), lengths_B=lengths_B
        )


@jax.jit
def error(got, wanted) -> jax.Array:
    """The largest difference, as `TOLERANCE` counts it; infinite where there is a NaN."""
    (out_BTHK, lse_BTH), (right_BTHK, right_BTH) = got, wanted
    sequence = range(1, right_BTHK.ndim)
    largest_B = jnp.abs(right_BTHK).max(axis=sequence)
    off_B = jnp.abs(out_BTHK - right_BTHK).max(axis=sequence) / jnp.maximum(largest_B, 1e-30)
    worst = jnp.maximum(off_B.max(), jnp.abs(lse_BTH - right_BTH).max())
    return jnp.where(jnp.isfinite(worst), worst, jnp.inf)
