"""The feed-forward layer: D → F → D with ReLU² (So et al. 2021, https://arxiv.org/abs/2109.08668)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lrkv_jax.nn.weight import weight


@jax.custom_jvp
def relu2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(x, 0)², whose gradient keeps one array, and no mask beside it."""
    return jnp.square(jax.nn.relu(x))


@relu2.defjvp
def _relu2_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return relu2(x), 2 * jax.nn.relu(x) * dx


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu2": relu2,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


class MLP(nnx.Module):
    """D → F → D, no biases; the second projection starts at zero."""

    def __init__(self, width: int, hidden: int, activation: str):
        self.up = weight("embed -> mlp", (width, hidden))
        self.down = weight("mlp -> embed", (hidden, width), std=0)
        self.activation = activation

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        h_BTF = checkpoint_name(x_BTD @ self.up[...].astype(x_BTD.dtype), "mlp")
        return ACTIVATIONS[self.activation](h_BTF) @ self.down[...].astype(x_BTD.dtype)
