"""From logits to the next token: greedy, temperature, top-k, top-p; a pure function of its key.

B sequences  V vocabulary
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lrkv_jax.errors import LrkvError

# Below it nothing but the likeliest token is ever drawn; a subnormal divisor would count as 0.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 is greedy; top_k = 0 and top_p = 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise LrkvError(f"temperature = {self.temperature}: use 0 (greedy) or more")
        if self.top_k < 0:
            raise LrkvError(f"top_k = {self.top_k}: use 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise LrkvError(f"top_p = {self.top_p}: use a share above 0, up to 1")


def sample(
    logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], how: Sampling
) -> Int[Array, "B"]:
    """One token a sequence, each from its own key, so that a batch changes nothing.

    Top-k keeps the k likeliest tokens; top-p then keeps the likeliest ones up to the first whose
    cumulative probability reaches p (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).
    Tokens tied with the last one kept stay too.
    """
    if how.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / max(how.temperature, LEAST_TEMPERATURE)
    if 0 < how.top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, how.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if how.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        p_BV = jax.nn.softmax(sorted_BV, axis=-1)
        kept_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < how.top_p
        least_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
