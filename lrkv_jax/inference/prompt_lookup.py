"""Prompt-lookup speculation: drafts of what comes next, found in the text itself.

If the last tokens of a text occur in it before, what followed them then is likely to follow them
now: when a model quotes, edits or repeats itself (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). Whether there is a draft, and which, depends
on the text alone.

B slots  F drafts that are read together  L ids of the longest text  T = W + 1  X = F · T
V vocabulary  W tokens of a draft
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from lrkv_jax.inference.pages import NULL
from lrkv_jax.inference.slots import SlotState, sample_tokens, write_tokens

# Tokens that must occur before. With 3, ten times as many drafts are found in sampled
# text, and hardly one is right.
MATCH = 4
# Tokens for each step of a call that a slot may take in it before it waits for the
# next.
TOKENS_PER_STEP = 4


def most_tokens(steps: int, draft_tokens: int) -> int:
    """Tokens that a slot can take in a call of so many steps."""
    return TOKENS_PER_STEP * steps + draft_tokens if draft_tokens else steps


def propose(
    ids_BL: Int[Array, "B L"], known_B: Int[Array, "B"], width: int
) -> tuple[Int[Array, "B W"], Bool[Array, "B"]]:
    """The `width` tokens that followed the last `MATCH` ids when they last occurred.

    `known_B` counts the ids of each text. A draft that reaches the text's end goes on from the
    draft's beginning, as a repetition would. Also returns which slots have a draft.
    """
    L, last_B1 = ids_BL.shape[1], known_B[:, None] - 1
    tail_BM = jnp.take_along_axis(ids_BL, jnp.maximum(last_B1 - jnp.arange(MATCH), 0), axis=1)
    place_P = jnp.arange(MATCH - 1, L)  # where a match may end
    alike_BP = place_P < last_B1
    for back in range(MATCH):
        alike_BP &= ids_BL[:, MATCH - 1 - back : L - back] == tail_BM[:, back : back + 1]
    end_B1 = jnp.where(alike_BP, place_P, -1).max(axis=1, keepdims=True)
    period_B1 = jnp.maximum(last_B1 - end_B1, 1)
    place_BW = end_B1 + 1 + jnp.arange(width) % period_B1
    return jnp.take_along_axis(ids_BL, place_BW, axis=1), end_B1[:, 0] >= 0


def verify(model, pool, slots, outputs, inputs, left_B, draft_BW, F):
    """Take a step for each slot that is `left_B`, with its draft after its token; F at a time.

    → (pool, slots, outputs). A token is drawn by its position, so it is the one that would be
    sampled without the draft, as long as the draft was right before it.
    """
    B, V = slots.token_counts_BV.shape
    T = draft_BW.shape[1] + 1

    def some(carry):
        left_B, pool, slots, outputs = carry
        slot_F = jnp.where(left_B, jnp.arange(B), B)
        if F < B:
            slot_F = jnp.sort(slot_F)[:F]

        def of(array_B):
            return array_B.at[slot_F].get(mode="clip")

        used_F = slot_F < B
        length_F = jnp.where(used_F, of(slots.length_B), 0)
        pages_FN = jax.tree.map(
            lambda table_BN: jnp.where(used_F[:, None], of(table_BN), NULL), inputs.pages_BN
        )
        text_FT = jnp.concatenate([of(slots.token_B)[:, None], of(draft_BW)], axis=1)
        x_FTD, pool = model.decode(text_FT, pool, length_F, pages_FN)
        logits_XV = model.logits(x_FTD).reshape(F * T, V)
        params = inputs.params.of_slots(jnp.repeat(slot_F, T))
        place_FT = length_F[:, None] + 1 + jnp.arange(T)

        def history():  # no slot that penalizes has a draft
            return jnp.zeros((F * T, V), jnp.int32), jnp.zeros((F * T, V), bool)

        token_X, logprobs_X = sample_tokens(logits_XV, params, history, place_FT.reshape(-1), None)
        token_FT = token_X.reshape(F, T)
        ended_FT = params.stopped_by(token_X).reshape(F, T)
        ended_FT |= place_FT + 1 >= of(inputs.end_B)[:, None]
        # Whether the place before was drafted rightly, and did not end the text.
        on_FT = (token_FT[:, :-1] == text_FT[:, 1:]) & ~ended_FT[:, :-1]
        on_FT = jnp.concatenate([used_F[:, None], on_FT], axis=1)
        count_F = jnp.cumprod(on_FT, axis=1).sum(axis=1)
        last_F1 = jnp.maximum(count_F - 1, 0)[:, None]

        def write(all_BM, new_X, start_F):
            new_FT = new_X.reshape(F, T, *new_X.shape[1:])
            return all_BM.at[slot_F].set(
                write_tokens(of(all_BM), new_FT, start_F, count_F), mode="drop"
            )

        taken_F = of(outputs.count_B)
        logprobs_BM = jax.tree.map(
            lambda all, new: write(all, new, taken_F), outputs.logprobs_BM, logprobs_X
        )
        outputs = replace(
            outputs,
            tokens_BM=write(outputs.tokens_BM, token_X, taken_F),
            logprobs_BM=logprobs_BM,
            count_B=outputs.count_B.at[slot_F].add(count_F, mode="drop"),
            drafted=outputs.drafted + used_F.sum() * (T - 1),
            accepted=outputs.accepted + count_F.sum() - used_F.sum(),
        )
        last_F, ended_F = (
            jnp.take_along_axis(of_FT, last_F1, axis=1)[:, 0] for of_FT in (token_FT, ended_FT)
        )
        slots = SlotState(
            slots.token_B.at[slot_F].set(last_F, mode="drop"),
            slots.length_B.at[slot_F].add(count_F, mode="drop"),
            slots.active_B.at[slot_F].set(~ended_F, mode="drop"),
            slots.token_counts_BV,
            slots.in_prompt_BV,
            write(slots.ids_BL, token_X, length_F + 1),
        )
        return left_B.at[slot_F].set(False, mode="drop"), pool, slots, outputs

    def any_left(carry):
        return carry[0].any()

    _, *state = jax.lax.while_loop(any_left, some, (left_B, pool, slots, outputs))
    return tuple(state)
