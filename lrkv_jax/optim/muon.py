"""Muon: momentum, orthogonalised matrix by matrix (https://kellerjordan.github.io/posts/muon/).

The update of a matrix with momentum U S Vᵀ is about U Vᵀ: every direction moves equally. What is a
matrix, and what only stacks matrices, is the weight's `WeightSpec`: [layers, heads, D, R] is
layers · heads matrices of D inputs and R outputs.

... batch axes of a weight  I fan-in  O fan-out  M the smaller of the two, N the larger
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lrkv_jax.nn.weight import WeightSpec

# Keller Jordan's quintic: the steepest at zero that keeps singular values within [0.68, 1.21].
QUINTIC = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """`momentum` mirrors the parameters, in float32, and is sharded as they are."""

    count: chex.Array
    momentum: optax.Updates


def orthogonalize(
    u_IO: Float[Array, "... I O"],
    *,
    iterations: int = 5,
    dtype: DTypeLike = jnp.float32,
    eps: float = 1e-7,
) -> Float[Array, "... I O"]:
    """U Vᵀ, nearly, of each matrix U S Vᵀ: Newton–Schulz iterations in `dtype`; float32 out.

    With five iterations, singular values from 2e-3 of the Frobenius norm up come out in
    [0.68, 1.21], smaller ones below; zeros stay zeros.
    """
    a, b, c = QUINTIC
    u_IO = u_IO.astype(jnp.float32)
    # nanochat rounds u, its norm and the quotient; here only the quotient is rounded.
    norm_11 = jnp.linalg.norm(u_IO, axis=(-2, -1), keepdims=True)
    x_IO = (u_IO / (norm_11 + eps)).astype(dtype)
    tall = x_IO.shape[-2] > x_IO.shape[-1]
    x_MN = x_IO.mT if tall else x_IO  # the Gram matrix is the smaller of the two
    # Float32 that is asked for is float32 on every device, not TensorFloat-32.
    precision = "highest" if x_IO.dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(precision):
        for _ in range(iterations):
            gram_MM = x_MN @ x_MN.mT
            x_MN = a * x_MN + (b * gram_MM + c * (gram_MM @ gram_MM)) @ x_MN
    return (x_MN.mT if tall else x_MN).astype(jnp.float32)


def scale_by_muon(
    specs: Any,
    *,
    momentum: float | optax.Schedule = 0.95,
    iterations: int = 5,
    dtype: DTypeLike = jnp.float32,
    eps: float = 1e-7,
) -> optax.GradientTransformation:
    """Replace each gradient by its orthogonalised Nesterov momentum · sqrt(max(1, O/I)).

    `specs` mirrors the parameters with a `WeightSpec` a leaf. The momentum is an average without
    bias correction, as in nanochat: optax.contrib.muon corrects it, which leaves the first update
    alone and changes the next five by 12 to 5 % (momentum 0.95, random gradients). `momentum` may
    be a schedule of the number of updates made so far.
    """
    beta_of = momentum if callable(momentum) else optax.constant_schedule(momentum)

    def direction(u: Array, spec: WeightSpec) -> Array:
        chex.assert_rank(u, len(spec.axes))
        if u.size == 0:  # an LRKV residual of rank 0
            return u.astype(jnp.float32)
        fan_in, fan_out = spec.fans(u.shape)
        # Batch axes are kept apart: merging a sharded one with another would gather it.
        u_IO = u.reshape(*u.shape[: spec.batch], fan_in, fan_out)
        x_IO = orthogonalize(u_IO, iterations=iterations, dtype=dtype, eps=eps)
        return (math.sqrt(max(1.0, fan_out / fan_in)) * x_IO).reshape(u.shape)

    def init(params: optax.Params) -> MuonState:
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(
        gradients: optax.Updates, state: MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        del params
        beta = beta_of(state.count)
        average = optax.tree.update_moment(gradients, state.momentum, beta, 1)
        nesterov = optax.tree.update_moment(gradients, average, beta, 1)
        updates = jax.tree.map(direction, nesterov, specs)
        return updates, MuonState(optax.safe_increment(state.count), average)

    return optax.GradientTransformation(init, update)
