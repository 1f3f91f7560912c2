"""Arrays of the engine's programs for each slot: its state, and a call's inputs and outputs.

B slots  N pages of a sequence, or steps of a call  V vocabulary
"""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lrkv_jax.inference.sampling import (
    BatchedSamplingParams,
    Logprobs,
    apply_penalties,
    likeliest,
    sample,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """The state of each slot. `token_B` is sampled, and not yet in the cache.

    For slots with penalties `token_counts_BV` counts the tokens of the new text, and `in_prompt_BV`
    has those of the prompt.
    """

    token_B: Int[Array, "B"]
    length_B: Int[Array, "B"]  # tokens in the cache
    active_B: Bool[Array, "B"]
    token_counts_BV: Int[Array, "B V"]
    in_prompt_BV: Bool[Array, "B V"]

    @classmethod
    def none(cls, slots: int, vocabulary: int) -> Self:
        """Empty slots."""
        token_B, length_B = jnp.zeros((2, slots), jnp.int32)
        token_counts_BV = jnp.zeros((slots, vocabulary), jnp.int32)
        in_prompt_BV = jnp.zeros(token_counts_BV.shape, bool)
        return cls(token_B, length_B, jnp.zeros(slots, bool), token_counts_BV, in_prompt_BV)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """The host's inputs of a call for each slot: its pages, where it ends, how it samples.

    Slots that are not `scheduled_B` do nothing. Those that are `fresh_B` take their token and
    length from here, and the others from `SlotState`. A table of pages for each of the config's
    `windows`.
    """

    pages_BN: tuple[Int[Array, "B N"], ...]
    end_B: Int[Array, "B"]
    scheduled_B: Bool[Array, "B"]
    fresh_B: Bool[Array, "B"]
    token_B: Int[Array, "B"]
    length_B: Int[Array, "B"]
    params: BatchedSamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """The samples of a call: `count_B` tokens for each slot, and their log-probabilities.

    `logits_BNV` are theirs if any is forced, else None.
    """

    tokens_BN: Int[Array, "B N"]
    logprobs_BN: Logprobs  # [B, N, ...]
    logits_BNV: Float[Array, "B N V"] | None
    count_B: Int[Array, "B"]

    @classmethod
    def none(cls, most: int, slots: int, vocabulary: int, *, forced: bool) -> Self:
        """Empty outputs of up to `most` tokens a slot, with their logits if any is `forced`."""
        logprobs_B = Logprobs.none(slots, vocabulary)
        return cls(
            jnp.zeros((slots, most), jnp.int32),
            jax.tree.map(lambda of: jnp.zeros((slots, most, *of.shape[1:]), of.dtype), logprobs_B),
            jnp.zeros((slots, most, vocabulary), jnp.float32) if forced else None,
            jnp.zeros(slots, jnp.int32),
        )  # fmt: skip


def write(all_BN, new_B, at_B, wanted_B):
    """All, with the new one of each row that is `wanted_B` at its place, `at_B`.

    A comparison with every place: XLA on a CPU makes a loop of each write to places that vary.
    """
    here_BN = (jnp.arange(all_BN.shape[1]) == at_B[:, None]) & wanted_B[:, None]
    here_BN = here_BN.reshape(*here_BN.shape, *[1] * (all_BN.ndim - 2))
    return jnp.where(here_BN, new_B[:, None], all_BN)


def sample_tokens(logits_BV, params, history, length_B, forced_B):
    """A token for each row, drawn by the position that it will have, and its `Logprobs`."""

    def forced(token_B):
        return token_B if forced_B is None else jnp.where(forced_B < 0, token_B, forced_B)

    def greedy():
        token_B = likeliest(logits_BV)
        return forced(token_B), Logprobs.none(*logits_BV.shape)

    def sampled():
        changed_BV = apply_penalties(logits_BV, params, history, length_B)
        token_B = forced(sample(changed_BV, params.keys_at(length_B), params))
        return token_B, Logprobs.of(logits_BV, token_B, params.logprobs_B.any())

    return jax.lax.cond(params.plain, greedy, sampled)
