"""The decode kernels at every scale's shapes, lowered or compiled for an H200 from a CPU machine.

Run as a program it compiles all kernels for the GPU that h200.txtpb beside it describes,
without one, and prints a JSON line a kernel: the cases that run it, what ptxas spilled, and how
many registers it used.
"""

import itertools
import json
import os
import re
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from lrkv_jax.config import load_config
from lrkv_jax.kernels import Residual, dispatch, grouped_decode, latent_decode, lrkv_decode
from lrkv_jax.kernels.gpu import kernel_check, launch
from lrkv_jax.kernels.gpu.schedule import TILE

SCALES = ("128m", "512m_8k", "1.2b", "2.5b", "6.3b")
MODES = ("full", "shared", "latent")
GROUPS = ("lrkv-full-groups", "lrkv-latent-groups")  # of two heads each
VARIANTS = (
    "mha", "gqa", "mqa", "mla", *(f"lrkv-{mode}" for mode in MODES), *GROUPS
)  # fmt: skip
BATCH, SLOTS = 4, 8192
TARGET = Path(__file__).with_name("h200.txtpb")


def case(scale, variant, T, array, how="contiguous"):
    """(function, arguments) of one kernel call; `array(shape, dtype)` makes an argument.

    `how` is "contiguous" or "paged".
    """
    kind, _, mode = variant.partition("-")
    model = load_config(f"configs/{scale}.yaml", [f"attention={kind}"]).model
    H, K, attention = model.heads, model.head_width, model.attention
    bf16, f32 = jnp.bfloat16, jnp.float32
    q, lengths = array((BATCH, T, H, K), bf16), array((BATCH,), jnp.int32)
    slots, pages = (BATCH, SLOTS), None
    if how == "paged":
        slots, pages = (BATCH * SLOTS // TILE, TILE), array((BATCH, SLOTS // TILE), jnp.int32)

    def call(kernel, *arguments):
        def of_pages(pages_BN, *arguments):
            return kernel(*arguments, pages_BN=pages_BN, scale=1.0, impl="mosaic")

        return of_pages, (pages, *arguments)

    if kind == "mla":
        C, P = attention.kv_lora_rank, attention.qk_rope_head_dim
        shapes = (BATCH, T, H, C), (BATCH, T, H, P), (*slots, C), (*slots, P)
        caches = [array(shape, bf16) for shape in shapes]
        return call(latent_decode, *caches, None, None, lengths)
    if kind != "lrkv":
        kv = array((*slots, attention.key_heads(model), K), bf16)
        return call(grouped_decode, q, kv, kv, lengths)
    mode, _, groups = mode.partition("-")
    G = H // 2 if groups else H
    if groups and T == 8:  # two heads' queries are eight then
        q = array((BATCH, 4, H, K), bf16)
    R, shared = attention.rank, array((*slots, K), bf16)
    latents = (array((*slots, G, cached), bf16) for cached in attention.cached_ranks(model))
    residual = Residual(*latents, array((G, R, K), f32))
    if mode == "full":
        residual = residual._replace(
            up_key_GRK=array((G, R, K), f32), angles_SK=array((SLOTS, K), f32)
        )
    else:
        residual = residual._replace(q_latent_BTHR=array((*q.shape[:3], R), bf16))
    norms = array((slots[0], G, slots[1]), f32)
    return call(lrkv_decode, q, shared, shared, residual, norms, lengths)


def lower(scale, variant, T):
    """The StableHLO text of a case lowered for CUDA; layouts and shared memory are checked."""
    function, arguments = case(scale, variant, T, jax.ShapeDtypeStruct)
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


class _Asked(Exception):
    """Ends a trace at the call that would be checked before a kernel's first use."""


def call_of(scale, variant, T, how):
    """The check's call of a `case`, with its plan for a GPU."""

    def failure_reason(call):
        raise _Asked(call)

    function, arguments = case(scale, variant, T, jax.ShapeDtypeStruct, how)
    gpu = mock.patch.object(dispatch, "_missing_gpu", lambda: None)
    with gpu, mock.patch.object(kernel_check, "failure_reason", failure_reason):
        try:
            jax.eval_shape(function, *arguments)
        except _Asked as asked:
            return asked.args[0]


def kernels(how):
    """{a case's name: (its plan, the names of all cases of `how` with the same machine code)}."""
    found = {}
    for scale, variant, T in itertools.product(SCALES, VARIANTS, (1, 8)):
        plan = call_of(scale, variant, T, how).plan
        name = f"{scale}/{variant}/{T}/{how}"
        found.setdefault(code(plan), (name, plan, []))[2].append(name)
    return {name: (plan, names) for name, plan, names in found.values()}


def code(plan):
    """What a kernel's machine code depends on.

    How many CTAs there are is not in it, nor, without latents and norms, which of its columns are
    used.
    """
    heads = plan.heads if plan.rank or plan.norm_heads else 0
    return plan.columns, replace(plan, heads=heads, units=0, groups=0, workers=0)


def compiled(names):
    """Compile each "scale/variant/T/layout" for the H200: yields (name, ptxas's log, temp bytes).

    The log has spills and registers. A kernel equal to one before is not compiled again, and has an
    empty log.
    """
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    # There is no GPU here to ask for, or to check a kernel on.
    dispatch._missing_gpu, kernel_check.failure_reason = lambda: None, lambda call: None
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    )
    place = NamedSharding(Mesh(topology.devices[:1], ("x",)), PartitionSpec())
    array = partial(jax.ShapeDtypeStruct, sharding=place)
    for name in names:
        scale, variant, T, how = name.split("/")
        with tempfile.TemporaryDirectory() as directory:
            os.environ["MOSAIC_GPU_DUMP_TO"] = directory
            function, arguments = case(scale, variant, int(T), array, how)
            program = jax.jit(function).lower(*arguments).compile()
            log = "".join(path.read_text() for path in sorted(Path(directory).glob("*.ptxas")))
        yield name, log, program.memory_analysis().temp_size_in_bytes


def main():
    """Compile each kernel with pages, and without them those with the most registers.

    Pages change the warpgroup that copies, and not those that attend, which hold the registers.
    """
    paged, largest = kernels("paged"), {}
    for name, (plan, names) in kernels("contiguous").items():
        kind = bool(plan.rank), plan.full, plan.values_in_keys
        if kind not in largest or plan.accumulators > largest[kind][1].accumulators:
            largest[kind] = name, plan, names
    chosen = paged | {name: (plan, names) for name, plan, names in largest.values()}
    for name, log, temp_bytes in compiled(chosen):
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
        plan, names = chosen[name]
        Q = plan.warpgroups
        asked = launch.PRODUCER_REGISTERS + Q * launch.CONSUMER_REGISTERS[Q]
        row = {
            "name": name,
            "same": names,
            # Registers a thread, of all warpgroups together, at the start and after.
            "given": registers[0] * (Q + 1) if registers else 0,
            "asked": asked if plan.ctas == 1 else 0,
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
            "registers": registers,
            "temp_bytes": temp_bytes,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
