"""JAX's devices: that they answer, and how fast they copy, multiply and talk to each other.

N devices  X values of each
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed import start
from lrkv_jax.distributed.hardware import Hardware, hardware_of
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.lab.bench import clock
from lrkv_jax.lab.bench.decode import COPY_BYTES
from lrkv_jax.lab.doctor.examine import SLOW, WRONG, Finding, judged
from lrkv_jax.models.layers import resolve_dtype

# Of the datasheet's figures.
COPIES, PRODUCTS, LINKS = 0.7, 0.55, 0.4
# A core of today's copies 5 to 15 GB/s and multiplies at 30 to 100 GFLOP/s.
CPU_COPIES, CPU_PRODUCTS = 2e9, 4e9
SAMPLES = 5
BYTES = {"cpu": 1 << 20, "gpu": 1 << 28}  # that each device adds to the sum
INTEGERS = 1 << 10  # float32 sums of fewer are exact


def devices(gpus: int) -> Finding:
    """The devices of JAX; the driver shows `gpus`."""
    start(command="lrkv doctor")
    here, backend = jax.local_devices(), jax.default_backend()
    faults = {}
    chosen = os.environ.get("JAX_PLATFORMS") == "cpu" or "CUDA_VISIBLE_DEVICES" in os.environ
    if not chosen and gpus > (len(here) if backend == "gpu" else 0):
        faults[f"the driver shows {gpus} GPUs"] = WRONG
    kind = here[0].device_kind
    measured = {"count": len(here), "backend": backend, "kind": kind}
    return judged("devices", faults, f"JAX computes on {len(here)} x {kind} ({backend})", measured)


def speed(index: int) -> list[Finding]:
    """One device's copies within its memory, and its products."""
    device = jax.local_devices()[index]
    with jax.default_device(device):
        most = COPY_BYTES.get(device.platform, COPY_BYTES["cpu"])
        nbytes = min(most, clock.memory_limit(device) // 4)
        copies = clock.quartiles(clock.copy_bandwidth(nbytes, SAMPLES))[1]
    dtype = resolve_dtype("auto").name
    timer, flops = clock.matmul_timer(make_mesh(MeshConfig(), [device]), dtype)
    products = flops / clock.quartiles(clock.interleaved([timer], SAMPLES)[0])[1]
    return check_speed(f"device {index}", hardware_of(device.device_kind), copies, products, dtype)


def check_speed(
    name: str, sheet: Hardware | None, copies: float, products: float, dtype: str
) -> list[Finding]:
    """Copies in bytes/s and products in FLOP/s of `dtype`, against a datasheet."""
    least = COPIES * sheet.memory_bandwidth if sheet else CPU_COPIES
    faults = {f"under {least / 1e9:.0f} GB/s": SLOW} if copies < least else {}
    text, measured = f"{copies / 1e9:.1f} GB/s", {"bytes_per_second": copies}
    found = [judged(f"{name}: copies", faults, text, measured)]
    least = PRODUCTS * sheet.bf16_flops if sheet else CPU_PRODUCTS
    faults = {f"under {least / 1e12:g} TFLOP/s": SLOW} if products < least else {}
    text = f"{products / 1e12:.3g} TFLOP/s in {dtype}"
    measured = {"flops_per_second": products}
    return [*found, judged(f"{name}: products", faults, text, measured)]


def between() -> Finding:
    """A sum over all devices: its result and its bandwidth."""
    here = jax.local_devices()
    N, nbytes = len(here), BYTES.get(here[0].platform, BYTES["gpu"])
    mesh = make_mesh(MeshConfig(data=N, fsdp=1), here)
    shape, sharding = (N, nbytes // 4), jax.NamedSharding(mesh, P("data"))
    x_NX = jax.jit(partial(_whole_numbers, shape), out_shardings=sharding)()
    program = jax.jit(partial(_sum_over_devices, mesh))
    wrong = not bool(jnp.array_equal(program(x_NX)[0], x_NX.sum(axis=0)))
    timer = clock.timer(program, [(x_NX,)], 1, 1)
    seconds = clock.quartiles(clock.interleaved([timer], SAMPLES)[0])[1]
    # An all-reduce is a reduce-scatter and an all-gather.
    rate = 2 * nbytes * (N - 1) / N / seconds
    return check_between(N, hardware_of(here[0].device_kind), rate, wrong=wrong)


def check_between(devices: int, sheet: Hardware | None, rate: float, *, wrong: bool) -> Finding:
    """Bytes/s that each device sends, against the datasheet's link."""
    faults = {f"the sum over {devices} devices is not that of their values": WRONG} if wrong else {}
    if sheet and rate < LINKS * sheet.link_bandwidth:
        faults[f"{rate / sheet.link_bandwidth:.0%} of the datasheet's link"] = SLOW
    text, measured = f"{rate / 1e9:.2g} GB/s", {"bytes_per_second": rate}
    return judged(f"all-reduce of {devices}", faults, text, measured)


def _whole_numbers(shape):
    """Small ones, whose float32 sums are exact."""
    return (jnp.arange(shape[0] * shape[1]).reshape(shape) % INTEGERS).astype(jnp.float32)


def _sum_over_devices(mesh, x_NX):
    def total(x_1X):
        return jax.lax.psum(x_1X, "data")

    return jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())(x_NX)
