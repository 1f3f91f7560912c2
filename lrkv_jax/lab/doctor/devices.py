"""JAX's devices: that they answer, and how fast they copy, multiply and talk to each other.

N devices
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
from lrkv_jax.lab.doctor.finding import SLOW, WRONG, Finding, at, judged
from lrkv_jax.models.layers import resolve_dtype

# Of the datasheet's figures; the plan assumes 0.8 and 0.6.
COPIES, PRODUCTS, LINKS, MEMORY = 0.7, 0.55, 0.4, 0.7
# A core of today's copies 5 to 15 GB/s and multiplies at 30 to 100 GFLOP/s.
CPU_COPIES, CPU_PRODUCTS = 2e9, 4e9
SAMPLES = 5
SIZES = {"cpu": (1 << 14, 1 << 20), "gpu": (1 << 16, 1 << 22, 1 << 28)}  # bytes of a device
INTEGERS = 1 << 10  # float32 sums of fewer are exact


def devices(gpus: int) -> Finding:
    """What JAX computes on, where the driver shows `gpus`."""
    start(alone="lrkv doctor")
    asked = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    here, backend = jax.local_devices(), jax.default_backend()
    faults = {}
    if backend == "cpu" and asked != "cpu" and (asked or gpus):
        why = f"JAX_PLATFORMS is {asked}" if asked else f"the driver shows {gpus} GPUs"
        faults[f"{why}, and JAX computes on the CPU"] = WRONG
    elif backend == "gpu" and len(here) < gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        faults[f"the driver shows {gpus} GPUs"] = WRONG
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in here]
    least = min(limits) if all(limits) else None
    sheet = hardware_of(here[0].device_kind)
    says = f"{len(here)} x {here[0].device_kind} ({backend})"
    if least:
        says += f", {least / 1e9:.0f} GB each for JAX"
        if sheet and least < MEMORY * sheet.memory:
            faults[f"{sheet.memory / 1e9:.0f} GB by the datasheet"] = SLOW
    measured = {"count": len(here), "backend": backend, "memory_bytes": least,
                "kind": here[0].device_kind}  # fmt: skip
    return judged("devices", faults, says, measured)


def speed(index: int) -> list[Finding]:
    """One device's copies within its memory, and its products."""
    device = jax.local_devices()[index]
    sheet, name = hardware_of(device.device_kind), f"device {index}"
    with jax.default_device(device):
        at("copies")
        nbytes = min(COPY_BYTES.get(device.platform, COPY_BYTES["cpu"]), clock.memory_limit() // 4)
        copies = clock.quartiles(clock.copy_bandwidth(nbytes, SAMPLES))[1]
    rates = {}
    mesh = make_mesh(MeshConfig(), [device])
    for dtype in ("bfloat16", "float32"):
        at(f"products in {dtype}")
        timer, flops = clock.matmul_timer(mesh, dtype)
        rates[dtype] = flops / clock.quartiles(clock.interleaved([timer], SAMPLES)[0])[1]
    return check_speed(name, sheet, copies, rates, resolve_dtype("auto").name)


def check_speed(
    name: str, sheet: Hardware | None, copies: float, rates: dict[str, float], dtype: str
) -> list[Finding]:
    """Copies in bytes/s and products in FLOP/s by dtype, against a datasheet; `dtype` is ours."""
    least = COPIES * sheet.memory_bandwidth if sheet else CPU_COPIES
    fault = {f"under {least / 1e9:.0f} GB/s": SLOW} if copies < least else {}
    of = f" ({copies / sheet.memory_bandwidth:.0%} of the datasheet's)" if sheet else ""
    measured = {"bytes_per_second": copies}
    says = f"{copies / 1e9:.1f} GB/s{of}"
    found = [judged(f"{name}: copies", fault, says, measured)]
    least = PRODUCTS * sheet.bf16_flops if sheet else CPU_PRODUCTS
    fault = {f"under {least / 1e12:g} TFLOP/s in {dtype}": SLOW} if rates[dtype] < least else {}
    of = f" ({rates['bfloat16'] / sheet.bf16_flops:.0%} of the datasheet's)" if sheet else ""
    says = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {d}" for d, rate in rates.items())
    return [*found, judged(f"{name}: products", fault, says + of, {"flops_per_second": rates})]


def between() -> Finding:
    """Sums over all devices at growing sizes: their results and their bandwidth."""
    here = jax.local_devices()
    N, sheet = len(here), hardware_of(here[0].device_kind)
    mesh = make_mesh(MeshConfig(data=N, fsdp=1), here)
    rates: dict[int, float] = {}
    wrong = False
    for nbytes in SIZES.get(here[0].platform, SIZES["gpu"]):
        at(f"{nbytes} bytes")
        shape, sharding = (N, nbytes // 4), jax.NamedSharding(mesh, P("data"))
        x_NX = jax.jit(partial(_whole_numbers, shape), out_shardings=sharding)()
        program = jax.jit(partial(_sum_over_devices, mesh))
        wrong |= not bool(jnp.array_equal(program(x_NX)[0], x_NX.sum(axis=0)))
        timer = clock.timer(program, [(x_NX,)], 1, 1)
        seconds = clock.quartiles(clock.interleaved([timer], SAMPLES)[0])[1]
        # An all-reduce is a reduce-scatter and an all-gather.
        rates[nbytes] = 2 * nbytes * (N - 1) / N / seconds
    return check_between(N, sheet, rates, wrong=wrong)


def check_between(
    devices: int, sheet: Hardware | None, rates: dict[int, float], *, wrong: bool
) -> Finding:
    """Bytes/s that each device sends, by the size of its array, against the datasheet's link."""
    faults = {f"the sum over {devices} devices is not that of their values": WRONG} if wrong else {}
    best = max(rates.values())
    if sheet and best < LINKS * sheet.link_bandwidth:
        faults[f"{best / sheet.link_bandwidth:.0%} of the datasheet's link"] = SLOW
    says = ", ".join(f"{r / 1e9:.2g} GB/s at {n >> 10} KiB" for n, r in rates.items())
    return judged(f"all-reduce of {devices}", faults, says, {"bytes_per_second": rates})


def _whole_numbers(shape):
    """Small ones, whose float32 sums are exact."""
    return (jnp.arange(shape[0] * shape[1]).reshape(shape) % INTEGERS).astype(jnp.float32)


def _sum_over_devices(mesh, x_NX):
    def total(x_1X):
        return jax.lax.psum(x_1X, "data")

    return jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())(x_NX)
