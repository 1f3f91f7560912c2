"""Attention and loss as pure functions of arrays: JAX alone, no parameters, no configuration.

| function | what it computes |
|---|---|
| `causal_attention` | a whole sequence's attention over itself, for training and prefill |
| `grouped_decode` | new tokens over the cache of MHA, GQA and MQA |
| `latent_decode` | new tokens over MLA's latents |
| `lrkv_decode` | new tokens over LRKV's factored cache |
| `mean_cross_entropy` | a loss that never holds all logits |

All of them can be jitted. The first and the last are differentiable. A cache of floats may be
`Int8Rows` instead, on the XLA path of the three decode functions.

B batch  T query positions  S key positions  H heads  G key/value heads  N heads per group (H / G)
K head width  R residual rank  C latent width  P rope-key width  V vocabulary
"""

from lrkv_jax.kernels.cross_entropy import Teacher, mean_cross_entropy
from lrkv_jax.kernels.flash import causal_attention
from lrkv_jax.kernels.grouped_decode import grouped_decode
from lrkv_jax.kernels.int8 import Int8Rows
from lrkv_jax.kernels.latent_decode import Private, Rotation, latent_decode
from lrkv_jax.kernels.lrkv_decode import Residual, lrkv_decode

__all__ = [
    "Int8Rows", "Private", "Residual", "Rotation", "Teacher", "causal_attention",
    "grouped_decode", "latent_decode", "lrkv_decode", "mean_cross_entropy",
]  # fmt: skip
