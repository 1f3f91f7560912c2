"""The feed-forward layer: D → F → D, plain or gated.

ReLU²: So et al. 2021, https://arxiv.org/abs/2109.08668. Gates: Shazeer 2020,
https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lrkv_jax.models.on_tensor import on_tensor
from lrkv_jax.models.weight import weight


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
    """D → F → D, no biases; the last projection starts at zero.

    down(act(up x)), and with a gate down(act(gate x) * up x).
    """

    def __init__(self, width: int, hidden: int, activation: str, *, gated: bool = False):
        self.up = weight("embed -> mlp", (width, hidden))
        self.gate = weight("embed -> mlp", (width, hidden)) if gated else None
        self.down = weight("mlp -> embed", (hidden, width), std=0)
        self.activation = activation

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.gate is None:
            h_BTF = ACTIVATIONS[self.activation](_product(x_BTD, self.up))
        else:
            h_BTF = on_tensor(MLP._gated, self, x_BTD)
        return h_BTF @ self.down[...].astype(x_BTD.dtype)

    def _gated(self, x_BTD):
        gate_BTF = ACTIVATIONS[self.activation](_product(x_BTD, self.gate))
        return gate_BTF * _product(x_BTD, self.up)


def _product(x_BTD, weight_DF):
    return checkpoint_name(x_BTD @ weight_DF[...].astype(x_BTD.dtype), "mlp")
