"""The mesh: four axes over all devices, and what cannot be split over them.

`data` and `fsdp` split the batch, `fsdp` the parameters too (over the model width), `context` the
positions of each sequence, `tensor` heads, feed-forward width and vocabulary. All are
`AxisType.Auto`: outside the training step, which places everything but `tensor` manually
(`lrkv_jax.distributed.manual_sharding`), the compiler places what no rule names.
"""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.errors import LrkvError

# Neighbors in the last axes are neighbors among the devices: tensor parallelism talks the most.
AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of `AXES` over all devices; a size of −1 takes what the others leave.

    Raises `LrkvError` if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    named = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free:
        sizes[free[0]] = len(devices) // named
    if math.prod(sizes.values()) != len(devices):
        axes = " x ".join(f"mesh.{axis}={getattr(config, axis)}" for axis in AXES)
        raise LrkvError(
            f"{axes} must multiply to the number of devices, {len(devices)}: "
            "set one of them to -1 to take what is left"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def in_use() -> jax.sharding.AbstractMesh | None:
    """The mesh in use, if it is one of `AXES` over several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES and mesh.size > 1 else None


def check_mesh(config: RunConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise `LrkvError` where the model, its teacher or the batch cannot be split over the mesh."""
    shape, taught = mesh.shape, config.train.teacher_model
    tensor, context = shape["tensor"], shape["context"]
    models = {"model": config.model} | ({} if taught is None else {"train.teacher's model": taught})
    for name, model in models.items():
        check_divides("mesh.tensor", tensor, f"{name}.heads", model.heads)
        check_divides("mesh.tensor", tensor, f"{name}.feed_forward", model.feed_forward_width)
        check_divides("mesh.fsdp", shape["fsdp"], f"{name}.width", model.width)
        # A device attends over whole sequences with its share of the heads.
        check_divides("mesh.context", context, f"{name}.heads / mesh.tensor", model.heads // tensor)
    rows = config.train.global_batch_size // config.train.grad_accum_steps
    batch = shape["data"] * shape["fsdp"]
    remedy = _batch_remedy(config.train.global_batch_size, config.train.grad_accum_steps, batch)
    name = "train.global_batch_size / train.grad_accum_steps"
    check_divides("mesh.data x mesh.fsdp", batch, name, rows, remedy)
    check_divides("mesh.context", context, "train.seq_len", config.train.seq_len)


def _batch_remedy(batch: int, accumulation: int, shares: int) -> str:
    """The setting that gives each of so many shares of the devices whole rows of a microbatch."""
    if batch % shares == 0:
        fitting = (n for n in range(accumulation, 0, -1) if batch // shares % n == 0)
        return f"set train.grad_accum_steps={next(fitting)}, or "
    least = shares * accumulation
    return f"set train.global_batch_size={-(-batch // least) * least}, or "


def check_divides(axis: str, size: int, name: str, total: int, remedy: str = "") -> None:
    """Raise `LrkvError` where a mesh axis of this size cannot split what there are `total` of.

    `remedy` comes before the sizes that would do, and ends in "or ".
    """
    if total % size:
        choices = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise LrkvError(
            f"{axis} = {size} does not divide {name} = {total}: {remedy}use one of {choices}"
        )
