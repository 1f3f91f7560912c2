"""Newton–Schulz on a mesh: each matrix is orthogonalized once, on one device, whole.

A weight is split: rows over fsdp, heads or columns over tensor, copies over data and context.
Weights of one shape form one long batch of matrices, which all devices share out among themselves
by all-to-all, orthogonalize, and bring back. What travels is the matrix divided by its norm, in the
dtype of the iterations, and the result, which has that dtype: both ways lose nothing.

N matrices of one shape, whose rows are the side that fsdp splits
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from lrkv_jax.distributed.mesh import in_use
from lrkv_jax.distributed.rules import partition
from lrkv_jax.models.weights import WeightSpec

Axes = tuple[str, ...]  # mesh axes
EPS = 1e-7  # added to a matrix's norm, as in nanochat


class MatrixLayout(NamedTuple):
    """A weight as a batch of matrices, and which mesh axes split each of their axes.

    With `flip`, rows are the weight's output side.
    """

    flip: bool
    rows: int
    columns: int
    batch_axes: Axes
    row_axes: Axes
    column_axes: Axes


def layout_of(spec: WeightSpec, shape: Sequence[int], mesh) -> MatrixLayout:
    """The layout of a weight of this global shape on the mesh."""
    places = partition(spec.axes, shape, mesh)
    middle = spec.batch + spec.inputs

    def axes(part):
        return tuple(name for name in part if name and mesh.shape[name] > 1)

    batch, inputs, outputs = places[: spec.batch], places[spec.batch : middle], places[middle:]
    fan_in, fan_out = spec.fans(shape)
    flip = "embed" in spec.axes[middle:]
    if flip:
        return MatrixLayout(flip, fan_out, fan_in, axes(batch), axes(outputs), axes(inputs))
    return MatrixLayout(flip, fan_in, fan_out, axes(batch), axes(inputs), axes(outputs))


def orthogonalize_on_mesh(
    iterate: Callable[[jax.Array], jax.Array],
    weights: Sequence[jax.Array],
    specs: Sequence[WeightSpec],
    dtype: DTypeLike,
) -> list[jax.Array]:
    """Orthogonalizes each matrix of each weight, float32, placed as `partition` places them.

    `iterate` takes and gives [N, rows, columns] in `dtype`.
    """
    mesh = in_use()
    places = [partition(s.axes, w.shape, mesh) for s, w in zip(specs, weights, strict=True)]
    layouts = [layout_of(s, w.shape, mesh) for s, w in zip(specs, weights, strict=True)]
    groups: dict[MatrixLayout, list[int]] = {}  # weights whose pieces have one shape, once flipped
    for i, layout in enumerate(layouts):
        groups.setdefault(layout._replace(flip=False), []).append(i)

    @jax.named_scope("muon")
    def local(weights):
        parts = [_matrices(w, s, lay) for w, s, lay in zip(weights, specs, layouts, strict=True)]
        batches = [jnp.concatenate([parts[i] for i in members]) for members in groups.values()]
        out = list(weights)
        for x_nab, (layout, members) in zip(
            _normalized(batches, list(groups), dtype), groups.items(), strict=True
        ):
            ends = np.cumsum([len(parts[i]) for i in members])[:-1]
            done = jnp.split(_distributed(iterate, x_nab, layout, mesh), ends)
            for i, piece in zip(members, done, strict=True):
                piece = piece.mT if layouts[i].flip else piece
                out[i] = piece.reshape(weights[i].shape).astype(jnp.float32)
        return out

    mapped = jax.shard_map(local, in_specs=(places,), out_specs=places, check_vma=False)
    return mapped(list(weights))


def _matrices(weight, spec, layout):
    """This device's part of a weight as [n, a, b]."""
    x = weight.reshape(-1, *spec.fans(weight.shape))
    return x.mT if layout.flip else x


def _normalized(batches, layouts, dtype):
    """Each matrix over its Frobenius norm, rounded to `dtype`."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2)) for x in batches]
    splits = [layout.row_axes + layout.column_axes for layout in layouts]
    for over in dict.fromkeys(filter(None, splits)):  # in one order in every process
        which = [i for i, split in enumerate(splits) if split == over]
        for i, total in zip(which, lax.psum([squares[i] for i in which], over), strict=True):
            squares[i] = total
    norms = [jnp.sqrt(total)[:, None, None] for total in squares]
    return [(x / (norm + EPS)).astype(dtype) for x, norm in zip(batches, norms, strict=True)]


def _distributed(f, x_nab, layout, mesh):
    """`f` of whole matrices, each on one device; `x_nab` and the result are split as `layout`."""
    split = layout.row_axes + layout.column_axes
    copies = tuple(
        name for name, size in mesh.shape.items()
        if size > 1 and name not in split + layout.batch_axes
    )  # fmt: skip
    shares = math.prod(mesh.shape[name] for name in split + copies)
    n = len(x_nab)
    x = jnp.pad(x_nab, ((0, -n % shares), (0, 0), (0, 0)))
    for name in layout.row_axes:
        x = lax.all_to_all(x, name, 0, 1, tiled=True)
    for name in layout.column_axes:
        x = lax.all_to_all(x, name, 0, 2, tiled=True)
    if copies:
        mine = len(x) // math.prod(mesh.shape[name] for name in copies)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(copies) * mine, mine)
    x = f(x)
    if copies:
        x = lax.all_gather(x, copies, axis=0, tiled=True)
    for name in reversed(layout.column_axes):
        x = lax.all_to_all(x, name, 2, 0, tiled=True)
    for name in reversed(layout.row_axes):
        x = lax.all_to_all(x, name, 1, 0, tiled=True)
    return x[:n]
