"""Timing: samples in random order, buffers rotated past the last-level cache, medians, quartiles.

On a CPU a call is timed behind others of its program, as layers follow each other.
Nothing is subtracted from a time: what a call costs to dispatch is measured beside it and reported.
Also the yardsticks: how fast this machine copies, and how fast it multiplies.

N side of a square matrix
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Rotating buffers add up to this many times the last-level cache, so that a call's data are gone
# from it when their turn comes again.
TIMES_THE_CACHE = 3
GPU_CACHE = 64 << 20  # H100 and H200 have 50 MiB of L2
UNKNOWN_CPU_CACHE = 64 << 20
# A GPU sample is several programs of several calls, so that the host stays ahead of the device.
GPU_CALLS, GPU_LAUNCHES = 8, 16

# Large enough for the library's best rate, small enough to be sampled often.
SIDE = {"cpu": 2048, "gpu": 8192}
IN_A_ROW = {"cpu": 1, "gpu": 8}  # on a GPU the host must stay ahead of the device

# Seconds of calls before the one that is timed: after 100 ms of another program's, the second and
# third of 4 ms still take 1.3 and 1.1 of the time.
LEAD = 0.01

Timer = Callable[[], float]


def last_level_cache() -> int:
    """Bytes of the largest cache of the device that computes; a guess where it does not say."""
    if jax.default_backend() != "cpu":
        return GPU_CACHE
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    found = [path.read_text().strip() for path in sizes]
    known = [int(size[:-1]) * units[size[-1]] for size in found if size[-1:] in units]
    return max(known, default=UNKNOWN_CPU_CACHE)


def copies_needed(nbytes: int, cache_bytes: int) -> int:
    """Buffers of `nbytes` to rotate: together `TIMES_THE_CACHE` caches or more."""
    return max(1, -(-TIMES_THE_CACHE * cache_bytes // max(nbytes, 1)))


def memory_limit() -> int:
    """Bytes that a benchmark may fill: a share of what the device has free."""
    if jax.default_backend() == "cpu":
        return int(0.6 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    stats = jax.devices()[0].memory_stats() or {}
    return int(0.8 * (stats.get("bytes_limit", 16 << 30) - stats.get("bytes_in_use", 0)))


def calls_and_launches(copies: int) -> tuple[int, int]:
    """Calls in a program, and programs started before the clock stops.

    1 and 1 on a CPU, where a call takes longer than its dispatch. No more calls than there are
    copies of the cache: XLA would compute what two calls on one copy share only once.
    """
    return (1, 1) if jax.default_backend() == "cpu" else (min(GPU_CALLS, copies), GPU_LAUNCHES)


def rotation(size: int) -> Iterator[int]:
    """Indices of so many buffers, again and again.

    Timers that read the same buffers share one: what one of them has just read would be in the
    cache for the next.
    """
    return itertools.cycle(range(size))


def timer(
    program: Callable,
    arguments: Sequence[tuple],
    calls: int,
    launches: int,
    turns: Iterator[int] | None = None,
) -> Timer:
    """A function that runs `program` on the next of `arguments`, and gives seconds per call.

    `turns` is a `rotation` of as many, shared with others that read the same; None is its own.
    """
    turns = turns or rotation(len(arguments))

    def run() -> None:
        jax.block_until_ready([program(*arguments[next(turns)]) for _ in range(launches)])

    return _sample(run, calls, launches)


def _sample(run: Callable[[], None], calls: int, launches: int) -> Timer:
    """Seconds per call of `run`.

    One of a single launch has others before it that are not counted: a layer's call follows other
    layers', and what it finds in the caches and on the heap is theirs, not that of some other
    program of the benchmark.
    """

    def sample() -> float:
        until = time.perf_counter() + LEAD
        while launches == 1 and time.perf_counter() < until:
            run()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / (calls * launches)

    return sample


def state_timer(program: Callable, states: list[Any], launches: int) -> Timer:
    """The same for a program that replaces the state it is given: state → (result, state)."""
    turns = rotation(len(states))

    def run() -> None:
        for _ in range(launches):
            turn = next(turns)
            result, states[turn] = program(states[turn])
        jax.block_until_ready((result, states))

    return _sample(run, 1, launches)


def interleaved(
    timers: Sequence[Timer], samples: int, seconds: float = 2.0, least: int = 5
) -> list[list[float]]:
    """Rounds of one sample of each timer, so that a busy moment of the machine meets them all.

    The order is drawn anew in each round: what a call finds in caches and in the allocator is what
    the one before it left. One that has used `seconds` stops at `least` samples. The first sample
    of each is not counted.
    """
    for sample in timers:
        sample()
    taken: list[list[float]] = [[] for _ in timers]
    rng = np.random.default_rng(0)
    for _ in range(samples):
        for index in rng.permutation(len(timers)):
            times = taken[index]
            if len(times) < least or sum(times) < seconds:
                times.append(timers[index]())
    return taken


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    first, median, third = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return first, median, third


def copy_bandwidth(nbytes: int, samples: int = 9) -> list[float]:
    """Bytes/s of a jitted in-place `x + 1`: each value is read once and written once."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(nbytes // 4, jnp.float32)
    rates = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        x = jax.block_until_ready(add(x))
        rates.append(2 * x.nbytes / (time.perf_counter() - start))
    return rates[1:]


def dispatch_seconds(samples: int = 31) -> float:
    """Median time of a jitted call that does next to nothing."""
    nothing, x = jax.jit(lambda x: x + 1), jnp.zeros(8)
    sample = timer(nothing, [(x,)], 1, 1)
    return quartiles(interleaved([sample], samples)[0])[1]


def side() -> int:
    """N here."""
    return SIDE["cpu" if jax.default_backend() == "cpu" else "gpu"]


def matmul_timer(mesh: Mesh, dtype: str) -> tuple[Timer, float]:
    """(timer, FLOPs): seconds of one N × N product in `dtype` on every device of the mesh at once.

    FLOPs are those of all devices together. Values are random: a GPU's clock depends on them.
    """
    N, devices = side(), mesh.size
    calls = IN_A_ROW["cpu" if jax.default_backend() == "cpu" else "gpu"]
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def make(seed: int, std: float):
        shape = (devices, N, N)
        draw = jax.jit(
            lambda: (std * jax.random.normal(jax.random.key(seed), shape)).astype(dtype),
            out_shardings=where,
        )
        return draw()

    # Entries stay N(0, 1) however many products follow each other.
    x_dNN, w_dNN = make(0, 1.0), make(1, N**-0.5)

    @jax.jit
    def products(x_dNN, w_dNN):
        for _ in range(calls):
            x_dNN = jnp.matmul(x_dNN, w_dNN)
        return x_dNN

    return timer(products, [(x_dNN, w_dNN)], calls, 1), 2.0 * N**3 * devices
