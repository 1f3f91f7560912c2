"""The mesh, and one table from the meaning of an axis to the mesh axis that shards it.

Mesh axes are `data` (batch), `fsdp` (batch, and parameters over the model width) and `tensor`
(heads, feed-forward width, vocabulary). All are `AxisType.Auto`: the compiler places what no rule
names. An axis that its mesh axis does not divide stays whole: that is how the single shared key of
MQA and LRKV is replicated under tensor parallelism. Shapes for which that would be a mistake are
refused by `check_mesh`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.errors import LrkvError

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

RULES: dict[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_width": None,
    "rank": None,
    "latent": None,
    "rope": None,
    "mlp": "tensor",
    "vocabulary": "tensor",
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh (data, fsdp, tensor) over all devices; a size of −1 takes what the others leave.

    Raises `LrkvError` if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    named = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free:
        sizes[free[0]] = len(devices) // named
    if math.prod(sizes.values()) != len(devices):
        printed = " x ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in AXES)
        raise LrkvError(
            f"{printed} do not multiply to the {len(devices)} devices here: "
            "set one of them to -1 to take what is left"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def check_mesh(config: RunConfig, mesh: Mesh) -> None:
    """Raise `LrkvError` where the model or the batch cannot be split over the mesh."""
    model, tensor, fsdp = config.model, mesh.shape["tensor"], mesh.shape["fsdp"]
    _divides("mesh.tensor", tensor, "model.heads", model.heads)
    _divides("mesh.tensor", tensor, "model.feed_forward", model.feed_forward_width)
    _divides("mesh.fsdp", fsdp, "model.width", model.width)
    rows = config.train.batch // config.train.accumulation
    _divides("mesh.data x mesh.fsdp", mesh.shape["data"] * fsdp, "train.batch a microbatch", rows)


def _divides(axis: str, size: int, name: str, whole: int) -> None:
    if whole % size:
        choices = ", ".join(str(n) for n in range(1, min(whole, 64) + 1) if whole % n == 0)
        raise LrkvError(f"{axis} = {size} does not divide {name} = {whole}: use one of {choices}")


def partition(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The placement of an array whose axes have these logical names."""
    return PartitionSpec(
        *(
            RULES[name] if RULES[name] and size % mesh.shape[RULES[name]] == 0 else None
            for name, size in zip(axes, shape, strict=True)
        )
    )


def parameter_shardings(specs: Any, shapes: Any, mesh: Mesh) -> Any:
    """`NamedSharding` of every parameter, from its `WeightSpec` and its shape."""
    return jax.tree.map(
        lambda spec, leaf: NamedSharding(mesh, partition(spec.axes, leaf.shape, mesh)),
        specs,
        shapes,
        is_leaf=lambda leaf: hasattr(leaf, "axes"),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def constrain_batch(x: jax.Array) -> jax.Array:
    """Keep a [B, ...] activation split over the batch axes of the mesh in use, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.shape[0] % math.prod(mesh.shape[axis] for axis in BATCH):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH))
