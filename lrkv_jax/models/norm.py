"""RMSNorm, without gain unless asked for (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lrkv_jax.models.weight import vector


def inverse_rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "..."]:
    """1 / sqrt(mean(x²) + eps) over the last axis, in float32.

    Rotation preserves norms, so this is the same before and after RoPE.
    """
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rms_norm(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """x · inverse_rms(x), computed in float32 and returned in x's dtype.

    Its gradient keeps x in its own dtype and a number a row, where autodiff would keep x in float32
    twice.
    """
    return _forward(x, eps)[0]


def _forward(x, eps):
    inverse = inverse_rms(x, eps)
    return (x.astype(jnp.float32) * inverse[..., None]).astype(x.dtype), (x, inverse)


def _backward(eps, saved, dy):
    x, inverse = saved[0].astype(jnp.float32), saved[1][..., None]
    y, dy32 = x * inverse, dy.astype(jnp.float32)
    dx = inverse * (dy32 - y * jnp.mean(y * dy32, axis=-1, keepdims=True))
    return (dx.astype(dy.dtype),)


rms_norm.defvjp(_forward, _backward)


class Norm(nnx.Module):
    """RMSNorm over the model width, with a learned gain if `gain`."""

    def __init__(self, width: int, *, gain: bool, eps: float):
        self.eps = eps
        self.gain = vector("embed", (width,), 1.0) if gain else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return gained(rms_norm(x, self.eps), self.gain)


def gained(x: Float[Array, "... D"], gain: nnx.Param | None) -> Float[Array, "... D"]:
    """x · gain over the last axis, in x's dtype; x without one."""
    return x if gain is None else x * gain[...].astype(x.dtype)
