"""The engine's compiled programs: fill the cache with a piece of text, begin, step on, score.

Each is one program for a batch, a cache and a way of sampling, whatever the prompts' and the
text's lengths. Caches are donated and written in place.

B sequences  T positions of a piece  D model width  N steps of a call  V vocabulary
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, UInt32

from lrkv_jax.decode.sampling import sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What steps read and replace. `token_B` is chosen but not yet in the cache."""

    cache: Any
    token_B: Int[Array, "B"]
    lengths_B: Int[Array, "B"]  # tokens in the cache
    stopped_B: Bool[Array, "B"]
    seed_2: UInt32[Array, "2"]  # a key's data
    draw_B: Int[Array, "B"]  # which of the seed's streams of draws is a sequence's


@partial(jax.jit, static_argnames="first", donate_argnames="cache")
def fill(model, cache, last_BD, tokens_BT, start_B, lengths_B, *, first):
    """Run positions start to start + T − 1 of each sequence; → (cache, last_BD).

    `lengths_B` are the whole sequences'; `last_BD` collects the hidden state of each one's last
    token. What a piece writes past a sequence's end is overwritten before it is read. The `first`
    piece attends to itself, the next ones to the cache.
    """
    if first:
        x_BTD, cache = model.prefill(tokens_BT, cache)
    else:
        x_BTD, cache = model.decode(tokens_BT, cache, start_B)
    place_B = lengths_B - 1 - start_B
    here_B = (place_B >= 0) & (place_B < tokens_BT.shape[1])
    x_BD = jnp.take_along_axis(x_BTD, jnp.where(here_B, place_B, 0)[:, None, None], axis=1)[:, 0]
    return cache, _everywhere(jnp.where(here_B[:, None], x_BD, last_BD))


@jax.jit
def next_log_p(model, last_BD, ids_BC):
    """Float32 log p [B, C] of each of some ids being the next one, given the last hidden states."""
    logits_BV = model.logits(last_BD[:, None])[:, 0]
    log_p_BC = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), ids_BC, axis=1)
    return _everywhere(log_p_BC)


@partial(jax.jit, donate_argnames="cache")
def score(model, cache, last_BD, tokens_BT, start_B):
    """Log p of each next token, and whether it is the likeliest; → (cache, last_BD, [B, T] twice).

    `last_BD` are the hidden states before the first of the tokens, and then of the last of them.
    Logits exist for one position at a time.
    """
    x_BTD, cache = model.decode(tokens_BT, cache, start_B)
    before_BTD = jnp.concatenate([last_BD[:, None], x_BTD[:, :-1]], axis=1)

    def position(pair):
        x_BD, token_B = pair
        logits_BV = model.logits(x_BD[:, None])[:, 0]
        log_p_BV = jax.nn.log_softmax(logits_BV)
        log_p_B = jnp.take_along_axis(log_p_BV, token_B[:, None], axis=1)[:, 0]
        return log_p_B, jnp.argmax(logits_BV, axis=1) == token_B

    log_p_TB, likeliest_TB = jax.lax.map(position, (before_BTD.swapaxes(0, 1), tokens_BT.T))
    return cache, *_everywhere((x_BTD[:, -1], log_p_TB.T, likeliest_TB.T))


@partial(jax.jit, static_argnames=("sampling", "stop"))
def begin(model, last_BD, lengths_B, idle_B, seed_2, draw_B, forced_B, *, sampling, stop):
    """From the last hidden states to what `steps` gives, of one step, and no cache."""
    state = DecodeState(None, lengths_B, lengths_B, idle_B, seed_2, draw_B)
    state, shown_B, logits_BV = _next(model, last_BD, state, forced_B, sampling, stop)
    results = shown_B[None], None if logits_BV is None else logits_BV[None]
    return _small_everywhere(state), *_everywhere(results)


@partial(jax.jit, static_argnames=("sampling", "stop", "most"), donate_argnames="state")
def steps(model, state, count, forced_NB, *, sampling, stop, most):
    """Up to `count` ≤ `most` steps, fewer if all sequences stop; → (state, tokens_NB, logits_NBV).

    Rows of steps that were not taken are −1. Without `forced_NB`, the tokens to take in place of
    sampled ones, there are no logits.
    """
    B = state.token_B.shape[0]
    tokens_NB = jnp.full((most, B), -1, jnp.int32)
    logits_NBV = None
    if forced_NB is not None:
        logits_NBV = jnp.zeros((most, B, model.config.vocabulary), jnp.float32)

    def more(carry):
        step, state, *_ = carry
        return (step < count) & ~state.stopped_B.all()

    def one(carry):
        step, state, tokens_NB, logits_NBV = carry
        x_B1D, cache = model.decode(state.token_B[:, None], state.cache, state.lengths_B)
        # A stopped sequence writes its slot again and again; nobody reads it.
        lengths_B = jnp.where(state.stopped_B, state.lengths_B, state.lengths_B + 1)
        state = replace(state, cache=cache, lengths_B=lengths_B)
        forced_B = None if forced_NB is None else forced_NB[step]
        state, shown_B, logits_BV = _next(model, x_B1D[:, 0], state, forced_B, sampling, stop)
        if logits_NBV is not None:
            logits_NBV = logits_NBV.at[step].set(logits_BV)
        return step + 1, state, tokens_NB.at[step].set(shown_B), logits_NBV

    carry = (jnp.zeros((), jnp.int32), state, tokens_NB, logits_NBV)
    _, state, *results = jax.lax.while_loop(more, one, carry)
    return _small_everywhere(state), *_everywhere(results)


def _next(model, x_BD, state, forced_B, sampling, stop):
    """Choose from the last hidden state, and mark the sequences that it stops.

    Returns the state, the tokens to show (−1 for a stopped sequence), and logits if forced.
    """
    logits_BV = model.logits(x_BD[:, None])[:, 0]
    if forced_B is None:
        # The key of a draw is the seed, the stream and the position: replays draw the same.
        root = jax.random.wrap_key_data(state.seed_2)
        keys_B = jax.vmap(partial(jax.random.fold_in, root))(state.draw_B)
        keys_B = jax.vmap(jax.random.fold_in)(keys_B, state.lengths_B)
        token_B, logits_BV = sample(logits_BV, keys_B, sampling), None
    else:
        token_B = forced_B
    stopped_B = state.stopped_B
    for token in stop:
        stopped_B = stopped_B | (token_B == token)
    shown_B = jnp.where(state.stopped_B, -1, token_B)
    return replace(state, token_B=token_B, stopped_B=stopped_B), shown_B, logits_BV


def _small_everywhere(state):
    """The state, all but its cache whole on every device: of one placement, so of one program."""
    return replace(_everywhere(replace(state, cache=None)), cache=state.cache)


def _everywhere(arrays):
    """The same arrays, whole on every device of the mesh in use: any process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    return jax.lax.with_sharding_constraint(arrays, PartitionSpec())
