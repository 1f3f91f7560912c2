"""From logits to the next token: greedy, temperature, top-k, top-p; a pure function of its key.

B sequences  V vocabulary
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """How each of B rows chooses: its `Sampling`, its stream of draws, and the ids that stop it.

    A table of arrays, so that one program serves every way of choosing. `stops_BX` is padded with
    −1, which no token is.
    """

    temperature_B: Float[Array, "B"]
    top_k_B: Int[Array, "B"]
    top_p_B: Float[Array, "B"]
    seed_B2: UInt32[Array, "B 2"]  # a key's data
    stream_B: Int[Array, "B"]
    stops_BX: Int[Array, "B X"]

    def keys_at(self, positions_B: Int[Array, "B"]) -> Key[Array, "B"]:
        """A key for each row, of its seed, its stream and the position: replays draw the same."""
        keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(self.seed_B2), self.stream_B)
        return jax.vmap(jax.random.fold_in)(keys_B, positions_B)

    def stopped_by(self, token_B: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Which rows a token ends."""
        return (token_B[:, None] == self.stops_BX).any(axis=1)


def sample(logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], how: Choice) -> Int[Array, "B"]:
    """One token a row, each by its own rule and from its own key, so that a batch changes nothing.

    Top-k keeps the k likeliest tokens; top-p then keeps the likeliest ones up to the first whose
    cumulative probability reaches p (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).
    Tokens tied with the last one kept stay too. Nothing is sorted or drawn unless a row asks.
    """
    greedy_B = how.temperature_B == 0
    likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    scaled_BV = logits_BV / jnp.maximum(how.temperature_B, LEAST_TEMPERATURE)[:, None]

    def drawn():
        cuts_B = ((how.top_k_B > 0) | (how.top_p_B < 1)) & ~greedy_B
        all_B1 = jnp.full_like(scaled_BV[:, :1], -jnp.inf)
        least_B1 = jax.lax.cond(cuts_B.any(), lambda: _least_kept(scaled_BV, how), lambda: all_B1)
        kept_BV = jnp.where(scaled_BV < least_B1, -jnp.inf, scaled_BV)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)
        return jnp.where(greedy_B, likeliest_B, drawn_B)

    return jax.lax.cond(greedy_B.all(), lambda: likeliest_B, drawn)


def _least_kept(logits_BV, how):
    """The smallest logit [B, 1] that each row's top-k and top-p keep."""
    V = logits_BV.shape[-1]
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    last_B = jnp.where(how.top_k_B > 0, jnp.minimum(how.top_k_B, V), V) - 1
    of_k_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], axis=1)
    sorted_BV = jnp.where(sorted_BV < of_k_B1, -jnp.inf, sorted_BV)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    kept_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < how.top_p_B[:, None]
    # Sums round: with top_p = 1 all that top-k keeps stays.
    kept_BV |= (how.top_p_B >= 1)[:, None]
    of_p_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.maximum(of_k_B1, of_p_B1)
