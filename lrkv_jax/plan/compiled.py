"""XLA's own figures of a training step, compiled for a mesh that is not there.

On a CPU the devices are simulated, and their program is scheduled for memory, as a GPU's is
(`FLAGS`). A CPU differs from a GPU in what it writes (`liveness.CPU`), in gathering bfloat16 as
float32, and in having no host memory to offload to. For `cuda` the step is compiled for H200s
without one, by the plugin of the extra `cuda13`; attention is then plain XLA, because
cuDNN asks for a GPU. Nothing is allocated either way.
"""

import math
import os
import time
from importlib import resources
from typing import Any

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.hardware import Hardware

TARGETS = ("cpu", "cuda")
# The scheduler that a CPU runs by default orders a program for parallel threads: the stacks of all
# loops then exist from the start.
FLAGS = ("--xla_cpu_enable_concurrency_optimized_scheduler=false",)


def prepare(config: RunConfig, devices: int | None, device: Hardware, target: str) -> None:
    """Set the flags that simulate the mesh's devices; JAX must not have started yet.

    Raises `LrkvError` for a target that is not one of `TARGETS`.
    """
    from lrkv_jax.plan.training import on_devices

    if target not in TARGETS:
        raise LrkvError(f"--target {target}: use {' or '.join(TARGETS)}")

    count = math.prod(on_devices(config, devices, device).mesh.model_dump().values())
    flags = (f"--xla_force_host_platform_device_count={count}", *FLAGS)
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags)).strip()
    # For `cuda` the plugin is there to compile, without the libraries that a GPU needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def compiled(config: RunConfig, training: dict[str, Any], target: str) -> dict[str, Any]:
    """What XLA says of the step, beside what the plan says of the same program.

    `training` is the plan of the step, `target` is `cpu` or `cuda`. Bytes are one device's. Raises
    `LrkvError` where the devices cannot be simulated.
    """
    import jax

    from lrkv_jax.accounting.timing import step_products
    from lrkv_jax.foresight import liveness
    from lrkv_jax.foresight.fit import WITHIN
    from lrkv_jax.foresight.step import abstract_step, memory, resolved
    from lrkv_jax.plan import hlo
    from lrkv_jax.sharding import make_mesh

    sizes, count = training["mesh"], training["devices"]
    config = resolved(config.model_copy(update={"mesh": MeshConfig(**sizes)}))
    start = time.perf_counter()
    mesh = make_mesh(config.mesh, _devices(target, count))
    step, state, tokens = abstract_step(config, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = step.on_leaves.lower(jax.tree.leaves(state), tokens).compile()
    seconds = time.perf_counter() - start
    stats, text = program.memory_analysis(), program.as_text()
    total = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    rules = liveness.GPU if target == "cuda" else liveness.CPU
    ours = memory(config, rules).peak
    train = config.train
    products = step_products(config.model, train.context, train.remat) * train.batch * train.context
    return {
        "target": target,
        "devices": count,
        "seconds": seconds,
        "arguments": stats.argument_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "host_temporary": stats.host_temp_size_in_bytes,
        "total": total,
        "plan": ours,
        "difference": ours / total - 1,
        "agrees": abs(ours / total - 1) <= WITHIN,
        # A GPU's products are calls into libraries, which do not say how large they are.
        "product_flops": hlo.product_flops(text) if target == "cpu" else None,
        "plan_product_flops": round(products / count + training["muon"]["flops_busiest_device"]),
        "collectives": hlo.sent(text, count),
        "predicted": hlo.by_kind(
            (m["kind"], math.prod(sizes[axis] for axis in m["axes"]), m["count"], m["bytes"])
            for m in training["collectives"]
        ),
    }


def _devices(target: str, count: int) -> list[Any]:
    import jax

    if target == "cpu":
        here = jax.devices("cpu")
        if len(here) < count:
            raise LrkvError(
                f"{count} devices cannot be simulated here, where JAX has started with "
                f"{len(here)}: set XLA_FLAGS=--xla_force_host_platform_device_count={count} first"
            )
        return here[:count]
    from jax.experimental import topologies

    description = resources.files("lrkv_jax.plan").joinpath("h200.txtpb").read_text()
    nodes = max(1, count // 8)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology=f"1x{nodes}x{count // nodes}"
        )
    except Exception as error:  # of several types, by plugin and version
        raise LrkvError(
            f"--target cuda: this installation cannot compile for CUDA ({error}): "
            'pip install -c constraints.txt -e ".[cuda13]"'
        ) from None
    return list(topology.devices)
