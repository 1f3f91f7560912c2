"""From logits to the next token: a pure function of the logits, the request's rules and its key.

B sequences  N reported likeliest tokens  V vocabulary  X ids that stop a row, or are biased
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from lrkv_jax.errors import LrkvError, whole

# Below it only the likeliest token is ever drawn; a subnormal divisor would
# count as 0.
MIN_TEMPERATURE = 1e-30
# Likeliest tokens that can be reported, and ids whose logits can be changed.
TOPS = 20
BIASES = 300
# Of a request's random numbers, whatever JAX's default is.
PRNG = "threefry2x32"


@dataclass(frozen=True)
class Sampling:
    """How to sample. Temperature 0 is greedy; top_k = 0, top_p = 1 and min_p = 0 keep every token.

    min_p: the least share of the likeliest token's probability that a token must have. Before all
    that, logits change: by the repetition penalty of a token that is in the prompt or the new text,
    which divides a logit above 0 and multiplies one below (Keskar et al. 2019,
    https://arxiv.org/abs/1909.05858); by the frequency penalty for each time that the token is in
    the new text so far, and once by the presence penalty; by `bias` of an id.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if name == "bias":
                if not isinstance(value, Mapping):
                    raise LrkvError(f"bias = {value!r}: give a mapping of ids to numbers")
            elif not isinstance(value, numbers.Real):
                raise LrkvError(f"{name} = {value!r}: use a number")
        whole("top_k", self.top_k)
        if not self.temperature >= 0:
            raise LrkvError(f"temperature = {self.temperature}: use 0 (greedy) or more")
        if self.top_k < 0:
            raise LrkvError(f"top_k = {self.top_k}: use 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise LrkvError(f"top_p = {self.top_p}: use a share above 0, up to 1")
        if not 0 <= self.min_p <= 1:
            raise LrkvError(f"min_p = {self.min_p}: use a share from 0 to 1")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise LrkvError(f"{name} = {getattr(self, name)}: use a number")
        if not 0 < self.repetition_penalty < math.inf:
            raise LrkvError(
                f"repetition_penalty = {self.repetition_penalty}: use a number above 0, 1 for none"
            )
        if len(self.bias) > BIASES or not all(map(math.isfinite, self.bias.values())):
            raise LrkvError(f"bias of {len(self.bias)} ids: give numbers for up to {BIASES}")

    @property
    def penalizes(self) -> bool:
        """Whether tokens depend on those that were sampled before."""
        repetition = self.repetition_penalty != 1
        return bool(self.frequency_penalty or self.presence_penalty or repetition)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchedSamplingParams:
    """How each of B slots samples: its `Sampling`, its random stream, and the ids that stop it.

    A table of arrays, so that one program serves every way of sampling. `stops_BX` and
    `bias_ids_BX` are padded with −1, which no token is; a stop is not sampled before its position
    `min_length_BX`. `logprobs_B` marks slots whose log-probabilities are wanted. `plain`: all slots
    take the likeliest token, and nothing else is wanted.
    """

    temperature_B: Float[Array, "B"]
    top_k_B: Int[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    frequency_B: Float[Array, "B"]
    presence_B: Float[Array, "B"]
    repetition_B: Float[Array, "B"]
    bias_ids_BX: Int[Array, "B X"]
    bias_BX: Float[Array, "B X"]
    seed_B2: UInt32[Array, "B 2"]  # a key's data
    stream_B: Int[Array, "B"]
    stops_BX: Int[Array, "B X"]
    min_length_BX: Int[Array, "B X"]
    logprobs_B: Bool[Array, "B"]
    plain: Bool[Array, ""]

    def keys_at(self, positions_B: Int[Array, "B"]) -> Key[Array, "B"]:
        """A key for each row, of its seed, its stream and the position: replays draw the same."""
        seeds_B = jax.random.wrap_key_data(self.seed_B2, impl=PRNG)
        keys_B = jax.vmap(jax.random.fold_in)(seeds_B, self.stream_B)
        return jax.vmap(jax.random.fold_in)(keys_B, positions_B)

    @property
    def penalized_B(self) -> Bool[Array, "B"]:
        """Rows whose tokens depend on those that were sampled before."""
        return (self.frequency_B != 0) | (self.presence_B != 0) | (self.repetition_B != 1)

    def stopped_by(self, token_B: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Which rows a token ends."""
        return (token_B[:, None] == self.stops_BX).any(axis=1)


class Logprobs(NamedTuple):
    """Float32 log p of a token under the model itself, and the likeliest tokens with theirs."""

    log_p_B: Float[Array, "B"]
    top_ids_BN: Int[Array, "B N"]
    top_log_p_BN: Float[Array, "B N"]

    @classmethod
    def of(
        cls, logits_BV: Float[Array, "B V"], token_B: Int[Array, "B"], wanted: Bool[Array, ""]
    ) -> "Logprobs":
        """Log-probabilities of each row; zeros, at no cost, unless they are `wanted`."""
        (B, V), N = logits_BV.shape, min(TOPS, logits_BV.shape[1])

        def compute():
            log_p_BV = jax.nn.log_softmax(logits_BV)
            log_p_B = jnp.take_along_axis(log_p_BV, token_B[:, None], axis=1)[:, 0]
            top_log_p_BN, top_ids_BN = jax.lax.top_k(log_p_BV, N)
            return cls(log_p_B, top_ids_BN.astype(jnp.int32), top_log_p_BN)

        return jax.lax.cond(wanted, compute, lambda: cls.none(B, V))

    @classmethod
    def none(cls, rows: int, vocabulary: int) -> "Logprobs":
        """Empty log-probabilities of so many rows."""
        N = min(TOPS, vocabulary)
        log_p_B, top_log_p_BN = jnp.zeros(rows, jnp.float32), jnp.zeros((rows, N), jnp.float32)
        return cls(log_p_B, jnp.zeros((rows, N), jnp.int32), top_log_p_BN)


def apply_penalties(
    logits_BV: Float[Array, "B V"],
    params: BatchedSamplingParams,
    history: Callable[[], tuple[Int[Array, "B V"], Bool[Array, "B V"]]],
    at_B: Int[Array, "B"],
) -> Float[Array, "B V"]:
    """Logits for the position `at_B`, with each row's bias and penalties, its early stops barred.

    `history` returns how often each token is in the row's new text, and whether it is in the
    prompt. Nothing is done unless a row needs it.
    """
    barred_BX = at_B[:, None] < params.min_length_BX
    biased = (params.bias_ids_BX >= 0).any() | params.penalized_B.any()

    def change():
        rows_B1, V = jnp.arange(len(logits_BV))[:, None], logits_BV.shape[1]
        token_counts_BV, in_prompt_BV = history()
        repetition_B1 = params.repetition_B[:, None]
        repeated_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
        new_BV = jnp.where(in_prompt_BV | (token_counts_BV > 0), repeated_BV, logits_BV)
        new_BV -= params.frequency_B[:, None] * token_counts_BV
        new_BV -= params.presence_B[:, None] * (token_counts_BV > 0)
        ids_BX = jnp.where(params.bias_ids_BX < 0, V, params.bias_ids_BX)
        new_BV = new_BV.at[rows_B1, ids_BX].add(params.bias_BX, mode="drop")
        stops_BX = jnp.where(barred_BX & (params.stops_BX >= 0), params.stops_BX, V)
        return new_BV.at[rows_B1, stops_BX].set(-jnp.inf, mode="drop")

    return jax.lax.cond(biased | barred_BX.any(), change, lambda: logits_BV)


def likeliest(logits_BV: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The first of each row's largest logits.

    On a CPU by two plain reductions: XLA makes one of pairs there, which takes eight times as long.
    """
    V = logits_BV.shape[1]
    if jax.default_backend() != "cpu":
        return jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
    largest_BV = logits_BV == logits_BV.max(axis=1, keepdims=True)
    return jnp.where(largest_BV, jnp.arange(V), V - 1).min(axis=1).astype(jnp.int32)


def sample(
    logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], params: BatchedSamplingParams
) -> Int[Array, "B"]:
    """One token a row, each by its rule and from its key, so that a batch changes nothing.

    Top-k keeps the k likeliest tokens; top-p then keeps the likeliest ones up to the first whose
    cumulative probability reaches p (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751); min-p
    keeps those with that share of the likeliest one's probability (Nguyen et al. 2024,
    https://arxiv.org/abs/2407.01082). Tokens tied with the last one kept stay too. Nothing is
    sorted or drawn unless a row requests it.
    """
    greedy_B = params.temperature_B == 0
    likeliest_B = likeliest(logits_BV)
    scaled_BV = logits_BV / jnp.maximum(params.temperature_B, MIN_TEMPERATURE)[:, None]

    def drawn():
        cuts_B = ((params.top_k_B > 0) | (params.top_p_B < 1)) & ~greedy_B
        all_B1 = jnp.full_like(scaled_BV[:, :1], -jnp.inf)
        threshold_B1 = jax.lax.cond(
            cuts_B.any(), lambda: _smallest_kept(scaled_BV, params), lambda: all_B1
        )
        share_B1 = jnp.log(params.min_p_B)[:, None]
        threshold_B1 = jnp.maximum(threshold_B1, scaled_BV.max(axis=1, keepdims=True) + share_B1)
        kept_BV = jnp.where(scaled_BV < threshold_B1, -jnp.inf, scaled_BV)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)
        return jnp.where(greedy_B, likeliest_B, drawn_B)

    return jax.lax.cond(greedy_B.all(), lambda: likeliest_B, drawn)


def _smallest_kept(logits_BV, params):
    """The smallest logit [B, 1] that each row's top-k and top-p keep."""
    V = logits_BV.shape[-1]
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    last_B = jnp.where(params.top_k_B > 0, jnp.minimum(params.top_k_B, V), V) - 1
    of_k_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], axis=1)
    sorted_BV = jnp.where(sorted_BV < of_k_B1, -jnp.inf, sorted_BV)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    kept_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < params.top_p_B[:, None]
    # Sums round: with top_p = 1 all that top-k keeps stays, and with one near 0 the likeliest.
    kept_BV |= (params.top_p_B >= 1)[:, None]
    kept_BV = kept_BV.at[:, 0].set(True)
    of_p_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.maximum(of_k_B1, of_p_B1)
