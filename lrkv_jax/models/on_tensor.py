"""A part of a layer that each tensor shard computes with its own heads, or its own hidden units.

It runs in a region that is manual over every mesh axis, so that the gradient of its input is summed
over tensor once, not once per product, and kernels never meet an axis that the compiler splits.

B batch  T positions  D model width
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from lrkv_jax.distributed import manual_sharding
from lrkv_jax.distributed.rules import TENSOR
from lrkv_jax.models.weight import spec_of, variables


def on_tensor(f: Callable, layer: nnx.Module, x_BTD, *data: Any):
    """`f(layer, x, *data)`, [B, T, H, ...], whose heads or hidden units H `tensor` splits.

    Outside a training step this is the call itself.
    """
    if not manual_sharding.in_train_step():
        return f(layer, x_BTD, *data)
    weights, tree = jax.tree.flatten(layer)
    parts = [
        manual_sharding.tensor_part(spec_of(v).axes, v.get_value().shape) for v in variables(layer)
    ]

    def local(weights, x_BTD, data):
        return f(tree.unflatten(weights), x_BTD, *data)

    heads = P(None, None, TENSOR)
    return manual_sharding.over_tensor(local, (parts, P(), P()), heads)(weights, x_BTD, data)
