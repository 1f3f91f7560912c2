"""Compiles a scan over layers with gathered weights for eight H200s, and prints what overlaps.

Run as a program: a JSON list of, for each all-gather in a loop, how many products are between its
start and its end; an all-gather that has no start holds everything up, and counts −1.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lrkv_jax.distributed.compilation import compile_ahead

TARGET = Path(__file__).with_name("h200.txtpb")
LAYERS, WIDTH, ROWS = 8, 2048, 8192


def layers(weights, x):
    def layer(x, weight):
        gathered = jax.lax.with_sharding_constraint(weight, PartitionSpec())
        return jnp.tanh(x @ gathered), None

    return jax.lax.scan(layer, x, weights)[0]


def overlaps(text):
    """Products between start and end of each all-gather in a computation that a loop runs."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        name = re.match(r"%([\w.\-]+)", computation)
        if name is None or name[1] not in bodies:
            continue
        products, started = 0, {}
        for line in computation.splitlines():
            products += "__cublas" in line or "gemm" in line
            if found := re.search(r"%([\w.\-]+) = .* all-gather-start\(", line):
                started[found[1]] = products
            elif found := re.search(r" all-gather-done\(%([\w.\-]+)\)", line):
                yield products - started[found[1]]
            elif re.search(r" all-gather\(", line):
                yield -1


if __name__ == "__main__":
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x8"
    )
    mesh = Mesh(topology.devices, ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    arguments = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=split),
        jax.ShapeDtypeStruct(
            (ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
        ),
    )
    compiled = compile_ahead(jax.jit(layers), *arguments, mesh=mesh)
    print(json.dumps(list(overlaps(compiled.call.as_text()))))
