"""Placement of an engine's parameters and cache: on one device, or split over a mesh."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lrkv_jax.config import ModelConfig
from lrkv_jax.distributed.mesh import AXES, check_divides
from lrkv_jax.distributed.rules import BATCH, parameter_shardings
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import on_mesh
from lrkv_jax.models.layers import resolve_dtype
from lrkv_jax.models.transformer import Unstacked, abstract_parameters, specs, with_parameters
from lrkv_jax.models.weights import join, spec_of, variables

_log = logging.getLogger("lrkv_jax.inference")


def check_parameters(config: ModelConfig, params: Any) -> None:
    """Raise `LrkvError` for parameters that are not those of `config`'s model."""
    there, needed = (
        {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in flat}
        for flat in map(jax.tree_util.tree_leaves_with_path, (params, abstract_parameters(config)))
    )
    for name in sorted(needed.keys() | there.keys()):
        if there.get(name) != needed.get(name):
            has, wants = (str(tree.get(name, "nothing")) for tree in (there, needed))
            raise LrkvError(
                f"the parameters are another model's: {name} is {has}, and the configuration "
                f"has {wants}"
            )


def model_of(config: ModelConfig, params: Any, mesh: Mesh | None) -> Unstacked:
    """The model with these parameters, as its steps read them, where they are read."""
    with jax.set_mesh(mesh):
        model = Unstacked(with_parameters(config, _in_compute_dtype(config, params)))
        if mesh is not None:
            return _placed(model, mesh)
        if jax.default_backend() == "cpu":
            for block in model.blocks:
                join(block.attention)
                join(block.mlp)
        return replicated(model, None)


def _in_compute_dtype(config: ModelConfig, params: Any) -> Any:
    """The parameters as a step reads them: matrices and tables in the computation's dtype.

    Every layer casts its float32 weights before it multiplies; done once, a step reads half.
    """
    dtype = resolve_dtype(config.dtype)
    return jax.tree.map(
        lambda spec, leaf: leaf if spec.group == "vector" else leaf.astype(dtype),
        specs(config),
        params,
    )


def mesh_for(config: ModelConfig, mesh: Mesh | None) -> Mesh | None:
    """The mesh to decode on: the given one, else the one in use; none for the first device.

    Raises `LrkvError` for a mesh of other axes, one whose `tensor` does not divide the heads, and
    for an interpreted kernel on several devices.
    """
    mesh = mesh or jax.sharding.get_mesh()
    if mesh.empty:
        return None
    if mesh.axis_names != AXES:
        raise LrkvError(
            f"a mesh of axes {', '.join(mesh.axis_names)}: decoding needs {', '.join(AXES)}, as "
            "make_mesh gives them"
        )
    check_divides("mesh.tensor", mesh.shape["tensor"], "model.heads", config.heads)
    if config.decode_kernel == "interpret" and mesh.size > 1:
        raise LrkvError(
            f"model.decode_kernel = interpret does not run on several devices, and the mesh has "
            f"{mesh.size}: use xla"
        )
    return None if list(mesh.devices.flat) == jax.local_devices()[:1] else mesh


def _placed(model: Unstacked, mesh: Mesh) -> Unstacked:
    """The model with its parameters placed as in training."""
    leaves, tree = jax.tree.flatten(model)
    where = parameter_shardings([spec_of(v) for v in variables(model)], leaves, mesh)
    model = jax.tree.unflatten(tree, jax.device_put(leaves, where))
    if not all(on_mesh.splits_heads(block.attention, mesh) for block in model.blocks):
        _log.warning(
            "mesh.tensor = %d does not divide the key/value heads: every tensor shard keeps and "
            "attends with all heads", mesh.shape["tensor"],
        )  # fmt: skip
    return model


def shards(mesh: Mesh | None) -> int:
    """Over how many shards sequences are split."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def replicated(arrays: Any, mesh: Mesh | None) -> Any:
    """The arrays, replicated on every device of the mesh, or on the first device.

    They are put there also where they are there: programs are compiled again for results that are
    on a mesh of one device, as a checkpoint's parameters are, or on no device in particular.
    """
    first = SingleDeviceSharding(jax.local_devices()[0])
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()) if mesh else first)


def page_bytes(model: Unstacked, page: int, window: int | None) -> int:
    """Allocated bytes of a page of so many tokens in all layers that have this window."""
    dtype = resolve_dtype(model.config.dtype)
    layers = [block.attention for block in model.blocks]
    shapes = [a.stored_shapes(1, page, dtype) for a in layers if a.config.window == window]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def new_cache(
    model: Unstacked, batches: Sequence[int], length: int, mesh: Mesh | None
) -> list[Any]:
    """An empty cache a layer, or a pool of pages, made in its placement.

    `batches` has the pages for each of the config's `windows`.
    """
    dtype, caches = resolve_dtype(model.config.dtype), []
    for block, batch in zip(model.blocks, model.by_layer(batches), strict=True):
        if mesh is None:
            caches.append(replicated(block.attention.init_cache(batch, length), None))
            continue
        shapes = block.attention.stored_shapes(batch, length, dtype)
        where = on_mesh.cache_shardings(block.attention, shapes, mesh)
        caches.append(
            jax.tree.map(
                lambda leaf, place: jnp.zeros(leaf.shape, leaf.dtype, device=place), shapes, where
            )
        )
    return caches
