"""One trial of a compiled decode kernel against XLA, in a process that may be lost.

A kernel that hangs on a GPU cannot be interrupted by its own process, and one that fails there
takes the process's device with it. So a trial is a process of its own, which
`lrkv_jax.kernels.proof` starts: it reads a pickled `Trial`, and writes a line of JSON at each stage
that it reaches. A stage that takes longer than it may is ended by SIGALRM, which no library holds
back, and which works without the process that asked.

B sequences  T queries  S cache slots  H heads  K head width  J = K / 2 frequency pairs
N pages of a sequence
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lrkv_jax.kernels.split_kv.schedule import TILE

# Largest difference over the largest output of the same sequence, or of a log-sum-exp. Weights are
# rounded to bfloat16, by up to 2⁻⁹ = 2e-3; the interpreted kernels differ by 4e-4 to 1.8e-3.
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Trial:
    """A family of calls of one kernel: all that its code depends on, and nothing else.

    `mosaic(plan, *arrays, lengths, scale, interpret)` is tried, and must equal `xla(*arrays,
    lengths, scale)`. `arrays` are shapes and dtypes and `axes` the letters of their axes; B, S and
    the number of pages are the trial's own, so that no batch, cache length or pool of a caller's is
    in it. The last array is the page table, if there is one: arrays with B and S are pools then.
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
    def of(cls, mosaic, xla, plan, axes, arrays, scale) -> Trial:
        """The trial of a call with these arrays, of any batch and cache length."""
        lengths, slots = ragged(plan)
        paged = arrays[-1] is not None
        if paged:
            slots = -(-slots // TILE) * TILE
        size = {"B": len(lengths), "S": slots, "N": slots // TILE}
        pool = {"B": 1 + len(lengths) * size["N"], "S": TILE}

        def like(names, array):
            if array is None:
                return None
            sizes = size | pool if paged and {*"BS"} <= {*names} else size
            shape = [sizes.get(name, n) for name, n in zip(names, array.shape, strict=True)]
            return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

        arrays = jax.tree.map(like, axes, arrays)
        return cls(mosaic, xla, plan, axes, arrays, lengths, slots, scale)


def ragged(plan) -> tuple[tuple[int, ...], int]:
    """(lengths of the trial's sequences, slots of its cache).

    Every worker's run of tiles is longer than its ring, so that slots are used again, and workers
    begin inside sequences and cross into the next. There are an empty sequence, one shorter than 8
    queries, whole tiles and partial ones; the cache's own last tile is partial too.
    """
    tiles = plan.workers * (-(-plan.ring // plan.tile_slots) + 3)
    most = max(2, -(-tiles // 4))
    a, b, c, d = most * TILE, (most - 1) * TILE + 1, most * TILE - 27, most * TILE + 5
    return (a, 3, b, 0, TILE, c, 2 * TILE + 2, d), most * TILE + 8


def problem(trial: Trial, seed) -> tuple[Any, jax.Array]:
    """Random arrays of unit variance, NaN in the slots past each sequence's length; the lengths.

    Pages are in random places of their pools, but for page 0, where all tables point past their
    sequences' last pages: it is NaN.
    """
    lengths_B = jnp.array(trial.lengths, jnp.int32)
    past_BS = jnp.arange(trial.slots) >= lengths_B[:, None]
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    pages_BN = None
    if trial.arrays[-1] is not None:
        B, N = trial.arrays[-1].shape
        pages_BN = 1 + jax.random.permutation(next(keys), B * N).reshape(B, N)
        pages_BN = jnp.where(past_BS[:, ::TILE], 0, pages_BN).astype(jnp.int32)

    def make(names, leaf):
        if leaf is None or names == "BN":
            return leaf and pages_BN
        if names == "SK":
            return _angles(*leaf.shape)
        size = {"B": len(trial.lengths), "S": trial.slots}
        shape = [size.get(name, n) for name, n in zip(names, leaf.shape, strict=True)]
        array = jax.random.normal(next(keys), shape, jnp.float32)
        if "B" not in names:  # a factor: its products keep the variance
            # Values that bfloat16 has: the kernel rounds B_h to it by design, and XLA does not.
            array = (array * leaf.shape[-2] ** -0.5).astype(jnp.bfloat16)
        elif "S" in names:
            others = [axis for axis, name in enumerate(names) if name not in "BS"]
            array = jnp.where(jnp.expand_dims(past_BS, others), jnp.nan, array)
            if pages_BN is not None:
                array = _pool(array, names.index("S"), pages_BN)
        return array.astype(leaf.dtype)

    return jax.tree.map(make, trial.axes, trial.arrays), lengths_B


def _pool(array, slots_axis, pages_BN):
    """The array's pages, where the table says, among pages of NaN."""
    N = pages_BN.shape[1]
    shape = array.shape
    pages = array.reshape(*shape[:slots_axis], N, TILE, *shape[slots_axis + 1 :])
    pages = jnp.moveaxis(pages, slots_axis, 1)
    return jnp.full((1 + pages_BN.size, *pages.shape[2:]), jnp.nan).at[pages_BN].set(pages)


def _angles(slots, width):
    """[cos, sin] of each slot's position, at RoPE's usual base."""
    turn_J = 10_000.0 ** (-jnp.arange(width // 2) / (width // 2))
    angle_SJ = jnp.arange(slots)[:, None] * turn_J[None]
    return jnp.concatenate([jnp.cos(angle_SJ), jnp.sin(angle_SJ)], axis=-1)


@jax.jit
def error(got, wanted) -> jax.Array:
    """The largest difference, as `TOLERANCE` counts it; infinite where there is a NaN."""
    (out_BTHK, lse_BTH), (right_BTHK, right_BTH) = got, wanted
    sequence = range(1, right_BTHK.ndim)
    largest_B = jnp.abs(right_BTHK).max(axis=sequence)
    off_B = jnp.abs(out_BTHK - right_BTHK).max(axis=sequence) / jnp.maximum(largest_B, 1e-30)
    worst = jnp.maximum(off_B.max(), jnp.abs(lse_BTH - right_BTH).max())
    return jnp.where(jnp.isfinite(worst), worst, jnp.inf)


def expected(trial: Trial, arrays, lengths_B):
    """What XLA gives for the same values, in float32."""

    def exact(array):
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(jnp.float32) if floating else array

    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda arrays, n_B: trial.xla(*arrays, n_B, trial.scale))(
            jax.tree.map(exact, arrays), lengths_B
        )


def tried(trial: Trial, arrays, lengths_B):
    """What the kernel gives: compiled, or interpreted on a CPU, where nothing can be compiled."""
    interpret = jax.default_backend() == "cpu"
    return trial.mosaic(trial.plan, *arrays, lengths_B, trial.scale, interpret)


def main() -> None:
    """Carry out the (trial, device kind, seconds of each stage) that is pickled on the input."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def reached(stage, **more):
        print(json.dumps({"stage": stage, **more}), file=output, flush=True)
        signal.setitimer(signal.ITIMER_REAL, seconds.get(stage, 0))

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    trial, device_kind, seconds = pickle.load(sys.stdin.buffer)
    reached("start")
    here = jax.local_devices()[0].device_kind
    if here != device_kind:
        raise RuntimeError(f"another process finds a {here} in place of the {device_kind}")
    arrays, lengths_B = jax.jit(partial(problem, trial))(0)  # of 0: XLA would fold a constant
    wanted = jax.block_until_ready(expected(trial, arrays, lengths_B))
    try:
        reached("compile")
        program = jax.jit(partial(tried, trial)).lower(arrays, lengths_B).compile()
        reached("run")
        got = jax.block_until_ready(program(arrays, lengths_B))
    except Exception as failure:  # a kernel may raise anything
        reached("raised", reason=f"{type(failure).__name__}: {failure}"[:2000])
    else:
        reached("compare")
        reached("done", error=float(error(got, wanted)))
    os._exit(0)  # a device that a kernel has broken may hold back an ordinary exit
