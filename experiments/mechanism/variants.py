"""The factorial's variants: MHA whose heads' key and value matrices are made in four ways.

    W_h          `mha_per_head {}`                              a matrix of its own for each head
    W_s + W_h    `mha_per_head {shared: true}`                  a shared path beside it
    U_h B_h      `mha_per_head {factored: true}`                a product of two factors, of rank K
    W_s + U_h B_h                                               both: the package's LRKV of rank K

All span the same functions. In each, Muon's matrix is a head's, and what LRKV draws is drawn: W_s,
and without it a head's whole matrix, with σ_W; with it a head's part has a tenth of its size.

`rate: 2` moves a head's keys and values twice as far a step: the matrix is half of what is trained,
which Muon's step, of one size for any matrix, moves as it would move the whole.

B batch  T tokens  D model width  H heads  K head width (and rank)
"""

from typing import ClassVar

import jax.numpy as jnp

from lrkv_jax.config.frozen import PositiveFloat, semantics
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import MHA
from lrkv_jax.models.attention.base import Attention
from lrkv_jax.models.attention.grouped import GroupedAttention, GroupedCache
from lrkv_jax.models.attention.head_weights import HeadWeights, by_head, in_float64
from lrkv_jax.models.weights import weight


class PerHead(MHA):
    """MHA with a matrix for each head's keys and one for its values, made in one of four ways."""

    name: ClassVar[str] = "mha_per_head"
    layer: ClassVar[str] = "PerHeadAttention"
    styles: ClassVar = {"full": ("#000000", "-.", "^")}
    shared: bool = semantics("Add one matrix that all heads share.", False)
    factored: bool = semantics(
        "Train a head's matrix as a product of two factors of rank K.", False
    )
    rate: PositiveFloat = semantics("How much further keys' and values' matrices move a step.", 1.0)

    def check(self, model):
        super().check(model)
        if model.qkv_bias:
            raise LrkvError("attention.kind = mha_per_head has no biases: set model.qkv_bias=false")
        if self.rate != 1 and (self.shared or self.factored):
            raise LrkvError(f"attention.rate = {self.rate} is of whole matrices: leave the others")

    @property
    def form(self) -> str:
        parts = {
            "shared": self.shared,
            "factored": self.factored,
            f"x{self.rate:g}": self.rate != 1,
        }
        return " ".join(part for part, there in parts.items() if there)

    def kv_parameters(self, model):
        D, H, K = model.width, model.heads, model.head_width
        head = K * (D + K) if self.factored else D * K
        return 2 * (H * head + (D * K if self.shared else 0))


class PerHeadAttention(GroupedAttention):
    """Keys and values of a head are x times its matrix; caches and kernels are MHA's."""

    def __init__(self, config):
        Attention.__init__(self, config)
        D, H, K = config.width, config.heads, config.head_width
        entry, self.groups = config.attention, config.heads
        std = min(1.0, (K / D) ** 0.5) * D**-0.5  # LRKV's σ_W
        size = 0.1 if entry.shared else 1.0
        self.query = weight("embed -> heads head_width", (D, H, K))
        for name in ("key", "value"):
            if entry.shared:
                setattr(self, f"{name}_shared", weight("embed -> head_width", (D, K), std=std))
            if entry.factored:
                down = weight("heads: embed -> rank", (H, D, K), std=std)
                up = weight("heads: rank -> head_width", (H, K, K), std=size * K**-0.5)
                setattr(self, f"{name}_down", down)
                setattr(self, f"{name}_up", up)
            else:
                own = weight("heads: embed -> head_width", (H, D, K), std=size * std / entry.rate)
                setattr(self, name, own)

    def matrices(self, name):
        """Each head's matrix of keys or values, [H, D, K]."""
        entry = self.config.attention
        if entry.factored:
            down_HDK, up_HKK = (getattr(self, f"{name}_{part}")[...] for part in ("down", "up"))
            own_HDK = jnp.einsum("HDR,HRK->HDK", down_HDK, up_HKK)
        else:
            own_HDK = entry.rate * getattr(self, name)[...]
        return own_HDK + getattr(self, f"{name}_shared")[...] if entry.shared else own_HDK

    def new_kv(self, x_BTD, positions_BT):
        k_BTHK, v_BTHK = (
            jnp.einsum("BTD,HDK->BTHK", x_BTD, self.matrices(name).astype(x_BTD.dtype))
            for name in ("key", "value")
        )
        return GroupedCache(self.norm_and_rope(k_BTHK, positions_BT, self.key_gain), v_BTHK)

    def head_weights(self):
        key_HDK, value_HDK = (in_float64(self.matrices(name)) for name in ("key", "value"))
        return HeadWeights(
            by_head(self.query), key_HDK, value_HDK, in_float64(self.output),
            gain_K=self.logit_gain(),
        )  # fmt: skip
