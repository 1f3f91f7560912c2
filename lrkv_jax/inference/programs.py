"""The engine's compiled programs: prefill, first token, decode, score, swap pages.

Each is one program for a pool of pages, whatever the requests' lengths, pages and ways of sampling.
Pools are donated and written in place. Slots without a sequence have a table of null pages and the
length 0.

B slots  F rows of a program that reads  T positions of a row  D model width  L tokens of the
longest sequence  N pages of a sequence, or steps of a call  V vocabulary
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lrkv_jax.inference.pages import NULL
from lrkv_jax.inference.sampling import likeliest
from lrkv_jax.inference.slots import SlotState, StepOutputs, sample_tokens, write
from lrkv_jax.models.attention import on_mesh


@partial(jax.jit, static_argnames="most", donate_argnames="pool")
def prefill(model, pool, tokens_FT, start_F, count_F, pages_FN, *, most):
    """Read positions start to start + count − 1 of each row; → (pool, the last states [most, D]).

    The states of F ≤ `most` rows are padded, so that what reads them is one program for chunks of
    any shape: products of few rows are not rounded as those of more are. What a chunk writes past
    its count is past the sequence's end or is overwritten before it is read.
    """
    x_FTD, pool = model.decode(tokens_FT, pool, start_F, pages_FN)
    x_FD = jnp.take_along_axis(x_FTD, (count_F - 1)[:, None, None], axis=1)[:, 0]
    return pool, _replicated(jnp.pad(x_FD, ((0, most - len(x_FD)), (0, 0))))


@partial(jax.jit, donate_argnames="slots")
def first_token(model, slots, x_FD, slot_F, length_F, end_F, params, forced_F):
    """Sample what follows prompts, from their last states.

    → (slots, tokens [F, 1], their `Logprobs`, logits if any is forced), as `decode` gives those of
    a step. `slot_F` are the slots that go on with it; one past the last is nobody's. `forced_F`
    are tokens to take instead of sampled ones, where they are not −1, or None.
    """
    logits_FV = model.logits(x_FD[:, None])[:, 0]

    def history():
        return [
            of.at[slot_F].get(mode="clip") for of in (slots.token_counts_BV, slots.in_prompt_BV)
        ]

    token_F, logprobs_F = sample_tokens(logits_FV, params, history, length_F, forced_F)
    active_F = ~params.stopped_by(token_F) & (length_F + 1 < end_F)
    slots = SlotState(
        slots.token_B.at[slot_F].set(token_F, mode="drop"),
        slots.length_B.at[slot_F].set(length_F, mode="drop"),
        slots.active_B.at[slot_F].set(active_F, mode="drop"),
        slots.token_counts_BV.at[slot_F, token_F].add(1, mode="drop"),
        slots.in_prompt_BV,
    )
    first = token_F, logprobs_F, None if forced_F is None else logits_FV
    return _replicated((slots, *jax.tree.map(lambda of_F: of_F[:, None], first)))


@partial(jax.jit, donate_argnames="slots")
def load_history(slots, slot, output_L, prompt_L):
    """The slots, one with its sampled and its given tokens; ids past V are none."""
    token_counts_V = jnp.zeros_like(slots.token_counts_BV[0]).at[output_L].add(1, mode="drop")
    in_prompt_V = jnp.zeros_like(slots.in_prompt_BV[0]).at[prompt_L].set(True, mode="drop")
    slots = replace(
        slots,
        token_counts_BV=slots.token_counts_BV.at[slot].set(token_counts_V),
        in_prompt_BV=slots.in_prompt_BV.at[slot].set(in_prompt_V),
    )
    return _replicated(slots)


@partial(jax.jit, donate_argnames="pool")
def score(model, pool, tokens_FT, start_F, pages_FN, targets_FT):
    """Score each target after its token: (pool, log p [F, T], whether it is the likeliest [F, T]).

    Logits exist for one position at a time.
    """
    x_FTD, pool = model.decode(tokens_FT, pool, start_F, pages_FN)

    def position(pair):
        x_FD, target_F = pair
        logits_FV = model.logits(x_FD[:, None])[:, 0]
        log_p_FV = jax.nn.log_softmax(logits_FV)
        log_p_F = jnp.take_along_axis(log_p_FV, target_F[:, None], axis=1)[:, 0]
        return log_p_F, likeliest(logits_FV) == target_F

    answers = jax.lax.map(position, (x_FTD.swapaxes(0, 1), targets_FT.T))
    return pool, *_replicated(tuple(answer.swapaxes(0, 1) for answer in answers))


@partial(jax.jit, static_argnames="most", donate_argnames=("pool", "slots"))
def decode(model, pool, slots, inputs, count, stop_early, forced_NB, *, most):
    """Take up to `count` ≤ `most` steps, fewer if all slots end, or if one does with `stop_early`.

    → (pool, slots, `StepOutputs`). `forced_NB` are tokens to take instead of sampled ones, where
    they are not −1; if it is None there are no logits.
    """
    B, V = slots.token_counts_BV.shape
    slots = replace(
        slots,
        token_B=jnp.where(inputs.fresh_B, inputs.token_B, slots.token_B),
        length_B=jnp.where(inputs.fresh_B, inputs.length_B, slots.length_B),
        active_B=inputs.fresh_B | slots.active_B,
    )
    # A slot that waits for its first call keeps that it is active.
    waiting_B = slots.active_B & ~inputs.scheduled_B
    slots = replace(slots, active_B=slots.active_B & inputs.scheduled_B)
    began_B = slots.active_B
    outputs = StepOutputs.none(most, B, V, forced=forced_NB is not None)

    def more(carry):
        step, _, slots, _ = carry
        ended = (slots.active_B != began_B).any()
        return (step < count) & slots.active_B.any() & ~(stop_early & ended)

    def one(carry):
        step, pool, slots, outputs = carry
        forced_B = None if forced_NB is None else forced_NB[step]
        return step + 1, *_step(model, step, pool, slots, outputs, inputs, forced_B)

    carry = (jnp.zeros((), jnp.int32), pool, slots, outputs)
    _, pool, slots, outputs = jax.lax.while_loop(more, one, carry)
    slots = replace(slots, active_B=slots.active_B | waiting_B)
    return pool, *_replicated((slots, outputs))


def _step(model, step, pool, slots, outputs, inputs, forced_B):
    """A token for each active slot: (pool, slots, outputs)."""
    acts_B = slots.active_B
    # A slot that is not active writes to no page: its pages may be another's by now.
    pages_BN = jax.tree.map(
        lambda table_BN: jnp.where(acts_B[:, None], table_BN, NULL), inputs.pages_BN
    )
    at_B = jnp.where(acts_B, slots.length_B, 0)
    x_B1D, pool = model.decode(slots.token_B[:, None], pool, at_B, pages_BN)
    logits_BV = model.logits(x_B1D)[:, 0]
    length_B = at_B + 1

    def history():
        return slots.token_counts_BV, slots.in_prompt_BV

    token_B, logprobs_B = sample_tokens(logits_BV, inputs.params, history, length_B, forced_B)
    tokens_BN, logprobs_BN = jax.tree.map(
        lambda all_BN, new_B: write(all_BN, new_B, outputs.count_B, acts_B),
        (outputs.tokens_BN, outputs.logprobs_BN), (token_B, logprobs_B),
    )  # fmt: skip
    outputs = replace(
        outputs,
        tokens_BN=tokens_BN,
        logprobs_BN=logprobs_BN,
        logits_BNV=None if forced_B is None else outputs.logits_BNV.at[:, step].set(logits_BV),
        count_B=outputs.count_B + acts_B,
    )
    ended_B = inputs.params.stopped_by(token_B) | (length_B + 1 >= inputs.end_B)
    slots = SlotState(
        jnp.where(acts_B, token_B, slots.token_B),
        jnp.where(acts_B, length_B, slots.length_B),
        slots.active_B & ~(acts_B & ended_B),
        slots.token_counts_BV.at[jnp.arange(len(acts_B)), token_B].add(acts_B.astype(jnp.int32)),
        slots.in_prompt_BV,
    )
    return pool, slots, outputs


@jax.jit
def swap_out(model, pool, places):
    """Copies of some pages, [N, ...] of each array, counted over all shards; any past the last.

    `places` are page numbers [N] for each of the config's `windows`.
    """
    return _replicated(
        [
            jax.tree.map(lambda pages, at=at: pages.at[at].get(mode="clip"), cache)
            for cache, at in zip(pool, model.by_layer(places), strict=True)
        ]
    )


@partial(jax.jit, donate_argnames="pool")
def swap_in(model, pool, places, content):
    """The pool with these pages' content, as `swap_out` gave it; pages past the last stay out."""
    new = []
    layers = zip(model.blocks, pool, model.by_layer(places), content, strict=True)
    for block, cache, at, some in layers:
        cache = jax.tree.map(
            lambda pages, own, at=at: pages.at[at].set(own, mode="drop"), cache, some
        )
        new.append(on_mesh.constrain_cache(block.attention, cache))
    return new


def _replicated(arrays):
    """The arrays, replicated on every device of the mesh in use: any process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    return jax.lax.with_sharding_constraint(arrays, PartitionSpec())
