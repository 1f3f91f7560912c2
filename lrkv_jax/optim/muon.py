"""Muon: momentum, orthogonalized matrix by matrix (https://kellerjordan.github.io/posts/muon/).

The update of a matrix with momentum U S Vᵀ is about U Vᵀ: every direction moves equally. What is a
matrix, and what only stacks matrices, is the weight's `WeightSpec`: [layers, heads, D, R] is
layers · heads matrices of D inputs and R outputs.

... batch axes of a weight  I fan-in  O fan-out  M the smaller of the two, N the larger
"""

import math
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lrkv_jax.distributed.mesh import in_use
from lrkv_jax.models.weights import WeightSpec
from lrkv_jax.optim.sharded_newton_schulz import EPS, orthogonalize_on_mesh

# Keller Jordan's quintic: the steepest at zero that keeps singular values within [0.68, 1.21].
# Rounded to bfloat16 it is another one, (3.4375, -4.78125, 2.03125), so it never is.
QUINTIC = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """`momentum` mirrors the parameters and is sharded as they are."""

    count: chex.Array
    momentum: optax.Updates


def orthogonalize(
    u_IO: Float[Array, "... I O"],
    *,
    iterations: int = 5,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... I O"]:
    """U Vᵀ, nearly, of each matrix U S Vᵀ: Newton–Schulz iterations in `dtype`; float32 out.

    With five iterations, singular values from 2e-3 of the Frobenius norm up come out in
    [0.68, 1.21] (in bfloat16, [0.675, 1.21]), smaller ones below; zeros stay zeros.
    """
    u_IO = u_IO.astype(jnp.float32)
    # nanochat rounds u, its norm and the quotient; here only the quotient is rounded.
    norm_11 = jnp.linalg.norm(u_IO, axis=(-2, -1), keepdims=True)
    x_IO = (u_IO / (norm_11 + EPS)).astype(dtype)
    return newton_schulz(x_IO, iterations).astype(jnp.float32)


def newton_schulz(x_IO: Float[Array, "... I O"], iterations: int) -> Float[Array, "... I O"]:
    """The iterations alone, of matrices of Frobenius norm 1 at most, in their dtype.

    That is the dtype of what is multiplied and kept; coefficients and sums are float32.
    """
    a, b, c = QUINTIC
    dtype = x_IO.dtype
    tall = x_IO.shape[-2] > x_IO.shape[-1]
    x_MN = x_IO.mT if tall else x_IO  # the Gram matrix is the smaller of the two
    # Requested float32 is float32 on every device, not TensorFloat-32.
    precision = "highest" if dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(precision):
        for _ in range(iterations):
            gram_MM = x_MN @ x_MN.mT
            square_MM = jnp.matmul(gram_MM, gram_MM, preferred_element_type=jnp.float32)
            quartic_MM = b * gram_MM.astype(jnp.float32) + c * square_MM
            more_MN = (quartic_MM.astype(dtype) @ x_MN).astype(jnp.float32)
            # Without the barrier XLA keeps each iteration's float32 sum: 4 times the memory.
            x_MN = lax.optimization_barrier((a * x_MN.astype(jnp.float32) + more_MN).astype(dtype))
    return x_MN.mT if tall else x_MN


def scale_by_muon(
    specs: Any,
    *,
    momentum: float | optax.Schedule = 0.95,
    iterations: int = 5,
    dtype: DTypeLike = jnp.float32,
    momentum_dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Replace each gradient by its orthogonalized Nesterov momentum · sqrt(max(1, O/I)).

    `specs` mirrors the parameters with a `WeightSpec` a leaf. On a training mesh each matrix is
    orthogonalized once, on one device (`orthogonalize_on_mesh`). The momentum is kept in
    `momentum_dtype`; it is an average without bias correction, as in nanochat: optax.contrib.muon
    corrects it, which leaves the first update alone and changes the next five by 12 to 5 %
    (momentum 0.95, random gradients). `momentum` may be a schedule of the number of updates made.
    """
    beta_of = momentum if callable(momentum) else optax.constant_schedule(momentum)

    def orthogonal(u: Array, spec: WeightSpec) -> Array:
        u_IO = u.reshape(-1, *spec.fans(u.shape))
        return orthogonalize(u_IO, iterations=iterations, dtype=dtype).reshape(u.shape)

    def directions(us: list[Array], specs: list[WeightSpec]) -> list[Array]:
        chex.assert_rank(us, [len(spec.axes) for spec in specs])
        if in_use() is not None:
            steps = partial(newton_schulz, iterations=iterations)
            out = orthogonalize_on_mesh(steps, us, specs, dtype)
        else:
            out = list(map(orthogonal, us, specs))
        fans = [spec.fans(u.shape) for u, spec in zip(us, specs, strict=True)]
        return [math.sqrt(max(1.0, o / i)) * x for x, (i, o) in zip(out, fans, strict=True)]

    def init(params: optax.Params) -> MuonState:
        zeros = optax.tree.zeros_like(params, dtype=momentum_dtype)
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(
        gradients: optax.Updates, state: MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        del params
        beta = beta_of(state.count)
        average = optax.tree.update_moment(gradients, state.momentum, beta, 1)
        nesterov = optax.tree.update_moment(gradients, average, beta, 1)
        leaves, tree = jax.tree.flatten(nesterov)
        leaves = directions(leaves, jax.tree.leaves(specs))
        average = optax.tree.cast(average, momentum_dtype)
        return jax.tree.unflatten(tree, leaves), MuonState(
            optax.safe_increment(state.count), average
        )

    return optax.GradientTransformation(init, update)
