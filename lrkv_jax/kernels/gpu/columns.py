"""Convert arrays [B, T, H, ...] to and from the kernel's (head, query) columns.

B batch  T queries  H heads  U units of heads  Q warpgroups per CTA  N columns of a warpgroup
"""

import jax.numpy as jnp

from lrkv_jax.kernels.gpu.plan import WIDTH


def to_columns(plan, q_BTHX, width=WIDTH):
    """[B, T, H, X] → [B, U, Q, blocks, N, width]: (head, query) columns, X cut and zero-padded."""
    B, T, H, X = q_BTHX.shape
    blocks = -(-X // width)
    pad = ((0, 0), (0, plan.queries - T), (0, 0), (0, blocks * width - X))
    q = jnp.pad(q_BTHX, pad).swapaxes(1, 2)
    q = q.reshape(B, plan.units, plan.warpgroups, plan.heads * plan.queries, blocks, width)
    extra = plan.columns - q.shape[3]
    return jnp.pad(q, [(0, extra if axis == 3 else 0) for axis in range(6)]).swapaxes(3, 4)


def own_columns(plan, blocks):
    """[B, U, Q, blocks, N, X] → [B, U, Q, heads · blocks, N, X], zero in other heads' columns."""
    head_N = jnp.arange(plan.columns) // plan.queries
    mine = head_N == jnp.arange(plan.heads)[:, None]
    spread = jnp.where(mine[:, None, :, None], blocks[:, :, :, None], 0)
    return spread.reshape(*blocks.shape[:3], -1, *blocks.shape[4:])


def from_columns(plan, array, T):
    """[B, U, Q, ..., N] → [B, T, H, ...]."""
    array = jnp.moveaxis(array, -1, 3)[:, :, :, : plan.heads * plan.queries]
    B, rest = array.shape[0], array.shape[4:]
    return array.reshape(B, plan.query_heads, plan.queries, *rest)[:, :, :T].swapaxes(1, 2)


def values_of(plan, sums, T, first, width):
    """`width` coordinates of the averages, from block `first` on: [B, T, H, width]."""
    blocks = -(-width // WIDTH)
    array = sums[:, :, :, first : first + blocks]
    flat = array.reshape(*array.shape[:3], blocks * WIDTH, plan.columns)
    return from_columns(plan, flat, T)[..., :width]
