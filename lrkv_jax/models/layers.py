"""The layers, except for attention: RMSNorm, the feed-forward layer, embedding and head.

RMSNorm has no gain unless configured (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467). The
feed-forward layer is D → F → D, plain (ReLU²: So et al. 2021, https://arxiv.org/abs/2109.08668) or
gated (Shazeer 2020, https://arxiv.org/abs/2002.05202).

B batch  T positions  D model width  F feed-forward width  V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from lrkv_jax.distributed import manual_sharding
from lrkv_jax.distributed.rules import TENSOR
from lrkv_jax.models.weights import by_rows, product, spec_of, variables, vector, weight


def resolve_dtype(name: str) -> jnp.dtype:
    """`float32` or `bfloat16` as named; `auto` is bfloat16 on an accelerator, float32 on a CPU.

    A CPU emulates bfloat16: slower, and less exact, than what it replaces.
    """
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def inverse_rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "..."]:
    """1 / sqrt(mean(x²) + eps) over the last axis, in float32.

    Rotation preserves norms, so this is the same before and after RoPE.
    """
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rms_norm(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """x · inverse_rms(x), computed in float32 and returned in x's dtype.

    Its gradient keeps x in x's dtype and one number per row; autodiff would keep x in float32
    twice.
    """
    return _norm_forward(x, eps)[0]


def _norm_forward(x, eps):
    inverse = inverse_rms(x, eps)
    return (x.astype(jnp.float32) * inverse[..., None]).astype(x.dtype), (x, inverse)


def _norm_backward(eps, saved, dy):
    x, inverse = saved[0].astype(jnp.float32), saved[1][..., None]
    y, dy32 = x * inverse, dy.astype(jnp.float32)
    dx = inverse * (dy32 - y * jnp.mean(y * dy32, axis=-1, keepdims=True))
    return (dx.astype(dy.dtype),)


rms_norm.defvjp(_norm_forward, _norm_backward)


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


def biased(x: Array, bias: nnx.Param | None) -> Array:
    """x + bias over the last axes, in x's dtype; x without one."""
    return x if bias is None else x + bias[...].astype(x.dtype)


def on_tensor(f: Callable, layer: nnx.Module, x_BTD, *data: Any):
    """`f(layer, x, *data)`, [B, T, H, ...], whose heads or hidden units H `tensor` splits.

    It runs in a region that is manual over every mesh axis. So the gradient of its input is summed
    over tensor once, not once per product, and no kernel gets an axis that the compiler splits.
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


@jax.custom_jvp
def relu2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(x, 0)², whose gradient keeps one array, and no mask next to it."""
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

    joins = ("up", "gate")

    def __init__(self, width: int, hidden: int, activation: str, *, gated: bool = False):
        self.up = weight("embed -> mlp", (width, hidden))
        self.gate = weight("embed -> mlp", (width, hidden)) if gated else None
        self.down = weight("mlp -> embed", (hidden, width), std=0)
        self.activation = activation

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.gate is None:
            h_BTF = ACTIVATIONS[self.activation](_hidden(x_BTD, self, "up"))
        else:
            h_BTF = on_tensor(MLP._gated, self, x_BTD)
        return by_rows(h_BTF, self.down[...].astype(x_BTD.dtype))

    def _gated(self, x_BTD):
        gate_BTF = ACTIVATIONS[self.activation](_hidden(x_BTD, self, "gate"))
        return gate_BTF * _hidden(x_BTD, self, "up")


def _hidden(x_BTD, mlp, name):
    return checkpoint_name(product(x_BTD, mlp, name), "mlp")


class Embedding(nnx.Module):
    """Token id → vector; N(0, 1) at the start."""

    def __init__(self, vocabulary: int, width: int):
        shape = (vocabulary, width)
        self.table = weight("vocabulary -> embed", shape, std=1.0, group="embedding")

    def __call__(self, tokens_BT: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        return manual_sharding.look_up(self.table[...], tokens_BT).astype(dtype)


class Head(nnx.Module):
    """Hidden state → logits; zeros at the start, so the first loss is ln V."""

    def __init__(self, vocabulary: int, width: int):
        shape = (width, vocabulary)
        self.kernel = weight("embed -> vocabulary", shape, std=0, group="head")
