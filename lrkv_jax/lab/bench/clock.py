"""Timing: samples in random order, buffers rotated past the last-level cache, medians, quartiles.

On a CPU a call is timed after others of its program, as layers follow each other.
Nothing is subtracted from a time: what a call costs to dispatch is in it.
Also the yardsticks: how fast this machine copies, and how fast it multiplies.

N side of a square matrix
"""

import itertools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lrkv_jax.distributed.hardware import host_memory

# Rotating buffers add up to so many bytes, so that a call's data are gone from the last-level cache
# when their turn comes again: 50 MiB on an H100, 32 to 64 on a CPU.
ROTATED_BYTES = 192 << 20
# On a GPU the host must stay ahead: a sample is several programs of several calls.
GPU_CALLS, GPU_LAUNCHES = 8, 16
SIDE, GPU_SIDE = 2048, 8192  # at which the library reaches its best rate, and no larger

# Seconds of calls before the one that is timed: after 100 ms of another program's, the second and
# third of 4 ms still take 1.3 and 1.1 of the time.
LEAD = 0.01

Timer = Callable[[], float]


def copies_needed(nbytes: int, room: int) -> int:
    """Buffers of `nbytes` to rotate: together `ROTATED_BYTES`, for all calls if `room` allows."""
    # A GPU's program with one short call would measure how fast the host starts programs.
    least = max(1, -(-ROTATED_BYTES // max(nbytes, 1)))
    calls = 1 if jax.default_backend() == "cpu" else min(GPU_CALLS, room // max(nbytes, 1))
    return max(least, calls)


def memory_limit(device: jax.Device | None = None) -> int:
    """Bytes that a benchmark may fill: a share of what a device, by default the first, has free."""
    if jax.default_backend() == "cpu":
        return int(0.6 * host_memory()[1])
    stats = (device or jax.devices()[0]).memory_stats() or {}
    return int(0.8 * (stats.get("bytes_limit", 16 << 30) - stats.get("bytes_in_use", 0)))


def calls_and_launches(copies: int) -> tuple[int, int]:
    """Calls in a program, and programs started before the clock stops.

    1 and 1 on a CPU, where a call takes longer than its dispatch. No more calls than there are
    copies of the cache: XLA would compute what two calls on one copy share only once.
    """
    return (1, 1) if jax.default_backend() == "cpu" else (min(GPU_CALLS, copies), GPU_LAUNCHES)


def timer(program: Callable, arguments: Sequence[tuple], calls: int, launches: int) -> Timer:
    """A function that runs `program` on the next of `arguments`, and gives seconds per call.

    A sample of a single launch has others before it that are not counted: a layer's call follows
    other layers', and what it finds in the caches and on the heap is theirs, not that of some other
    program of the benchmark.
    """
    turns = itertools.cycle(arguments)

    def run() -> None:
        jax.block_until_ready([program(*next(turns)) for _ in range(launches)])

    def sample() -> float:
        until = time.perf_counter() + LEAD
        while launches == 1 and time.perf_counter() < until:
            run()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / (calls * launches)

    return sample


def interleaved(
    timers: Sequence[Timer], samples: int, seconds: float = 2.0, least: int = 5
) -> list[list[float]]:
    """Rounds of one sample of each timer, so that a busy moment of the machine affects them all.

    The order is drawn again in each round, since a call finds caches and the allocator as the call
    before it left them. One that has used `seconds` stops at `least` samples. The first sample
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
    count = 1 if jax.default_backend() == "cpu" else GPU_CALLS
    rates = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        for _ in range(count):
            x = add(x)
        jax.block_until_ready(x)
        rates.append(2 * count * x.nbytes / (time.perf_counter() - start))
    return rates[1:]


def matmul_timer(mesh: Mesh, dtype: str) -> tuple[Timer, float]:
    """(timer, FLOPs): seconds of one N × N product in `dtype` on every device of the mesh at once.

    FLOPs are those of all devices together. Values are random: a GPU's clock depends on them.
    """
    on_cpu, devices = jax.default_backend() == "cpu", mesh.size
    N, calls = (SIDE, 1) if on_cpu else (GPU_SIDE, GPU_CALLS)
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
