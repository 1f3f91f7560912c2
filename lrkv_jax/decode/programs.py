"""The engine's compiled programs: read a piece of text, begin, step on, score, move pages.

Each is one program for a pool of pages, whatever the requests' lengths, pages and ways of sampling.
Pools are donated and written in place. Rows without a request have a table of null pages and the
length 0.

B rows  F rows of a piece  T positions of a piece  D model width  L ids of a text  N pages of a
sequence, or steps of a call  V vocabulary
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from lrkv_jax.attention import on_mesh
from lrkv_jax.decode.pages import NULL
from lrkv_jax.decode.sampling import Choice, Told, adjusted, sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Where each row stands. `token_B` is chosen, and not yet in the cache.

    `said_BV` counts the tokens of its new text, of rows that penalties were asked for.
    """

    token_B: Int[Array, "B"]
    length_B: Int[Array, "B"]  # tokens in the cache
    going_B: Bool[Array, "B"]
    said_BV: Int[Array, "B V"]

    @classmethod
    def none(cls, rows: int, vocabulary: int) -> Self:
        """Rows that nobody has."""
        token_B, length_B = jnp.zeros((2, rows), jnp.int32)
        said_BV = jnp.zeros((rows, vocabulary), jnp.int32)
        return cls(token_B, length_B, jnp.zeros(rows, bool), said_BV)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """What the host says of each row for a call: its pages, where it ends, and how it chooses.

    Rows that are not `live_B` do nothing. Those that are `fresh_B` take their token and length from
    here, and the others from `Rows`.
    """

    pages_BN: Int[Array, "B N"]
    end_B: Int[Array, "B"]
    live_B: Bool[Array, "B"]
    fresh_B: Bool[Array, "B"]
    token_B: Int[Array, "B"]
    length_B: Int[Array, "B"]
    choice: Choice


@partial(jax.jit, static_argnames="most", donate_argnames="pool")
def fill(model, pool, tokens_FT, start_F, count_F, pages_FN, *, most):
    """Read positions start to start + count − 1 of each row; → (pool, the last states [most, D]).

    The states of F ≤ `most` rows are filled up, so that what reads them is one program for pieces
    of any shape: products of few rows are not rounded as those of more are. What a piece
    writes past its count lies past the sequence's end or is overwritten before it is read.
    """
    x_FTD, pool = model.decode(tokens_FT, pool, start_F, pages_FN)
    x_FD = jnp.take_along_axis(x_FTD, (count_F - 1)[:, None, None], axis=1)[:, 0]
    return pool, _everywhere(jnp.pad(x_FD, ((0, most - len(x_FD)), (0, 0))))


@partial(jax.jit, donate_argnames="rows")
def begin(model, rows, x_FD, row_F, length_F, end_F, choice, forced_F):
    """Choose what follows prompts, from their last states.

    → (rows, tokens [F], what is told of them, logits if any is forced). `row_F` are the rows that
    go on with it; one past the last is nobody's. `forced_F` are tokens to take in place of chosen
    ones, where they are not −1, or None.
    """
    logits_FV = model.logits(x_FD[:, None])[:, 0]

    def said():
        return rows.said_BV.at[row_F].get(mode="clip")

    token_F, told_F = _chosen(logits_FV, choice, said, length_F, forced_F)
    going_F = ~choice.stopped_by(token_F) & (length_F + 1 < end_F)
    rows = Rows(
        rows.token_B.at[row_F].set(token_F, mode="drop"),
        rows.length_B.at[row_F].set(length_F, mode="drop"),
        rows.going_B.at[row_F].set(going_F, mode="drop"),
        rows.said_BV.at[row_F, token_F].add(1, mode="drop"),
    )
    return _everywhere((rows, token_F, told_F, None if forced_F is None else logits_FV))


@partial(jax.jit, donate_argnames="rows")
def recount(rows, row, ids_L):
    """The rows, one of them with the tokens `ids_L` as its new text; those past V are none."""
    said_V = jnp.zeros_like(rows.said_BV[0]).at[ids_L].add(1, mode="drop")
    return _everywhere(replace(rows, said_BV=rows.said_BV.at[row].set(said_V)))


@jax.jit
def next_log_p(model, x_FD, ids_FC):
    """Float32 log p [F, C] of each of some ids being the next one, given the last states."""
    logits_FV = model.logits(x_FD[:, None])[:, 0]
    return _everywhere(jnp.take_along_axis(jax.nn.log_softmax(logits_FV), ids_FC, axis=1))


@partial(jax.jit, donate_argnames="pool")
def score(model, pool, tokens_FT, start_F, pages_FN, targets_FT, asked):
    """Each target after its token: pool, its log p [F, T], whether it is the likeliest, the tops.

    The likeliest ids and their log p, [F, T, K], are computed if they are `asked` for. Logits exist
    for one position at a time.
    """
    x_FTD, pool = model.decode(tokens_FT, pool, start_F, pages_FN)

    def position(pair):
        x_FD, target_F = pair
        logits_FV = model.logits(x_FD[:, None])[:, 0]
        log_p_FV = jax.nn.log_softmax(logits_FV)
        log_p_F = jnp.take_along_axis(log_p_FV, target_F[:, None], axis=1)[:, 0]
        told_F, *tops = Told.of(logits_FV, target_F, asked)
        # A likeliest token's log p is to be the same number in both places.
        log_p_F = jnp.where(asked, told_F, log_p_F)
        return log_p_F, jnp.argmax(logits_FV, axis=1) == target_F, *tops

    answers = jax.lax.map(position, (x_FTD.swapaxes(0, 1), targets_FT.T))
    return pool, *_everywhere(tuple(answer.swapaxes(0, 1) for answer in answers))


@partial(jax.jit, static_argnames="most", donate_argnames=("pool", "rows"))
def steps(model, pool, rows, given, count, hurry, forced_NB, *, most):
    """Up to `count` ≤ `most` steps; fewer if all rows end, or, in a `hurry`, if one does.

    → (pool, rows, tokens_NB, what is told of them, logits_NBV). Tokens of steps that a row did not
    take are −1. `forced_NB` are tokens to take in place of chosen ones, where they are not −1; if
    it is None there are no logits.
    """
    B, V = rows.said_BV.shape
    rows = replace(
        rows,
        token_B=jnp.where(given.fresh_B, given.token_B, rows.token_B),
        length_B=jnp.where(given.fresh_B, given.length_B, rows.length_B),
        going_B=given.fresh_B | rows.going_B,
    )
    # A row that waits for its first call keeps that it is going.
    waiting_B = rows.going_B & ~given.live_B
    rows = replace(rows, going_B=rows.going_B & given.live_B)
    began_B, tokens_NB = rows.going_B, jnp.full((most, B), -1, jnp.int32)
    told_N = jax.tree.map(lambda of: jnp.zeros((most, *of.shape), of.dtype), Told.none(B, V))
    logits_NBV = None
    if forced_NB is not None:
        logits_NBV = jnp.zeros((most, B, V), jnp.float32)

    def more(carry):
        step, _, rows, *_ = carry
        ended = (rows.going_B != began_B).any()
        return (step < count) & rows.going_B.any() & ~(hurry & ended)

    def one(carry):
        step, pool, rows, tokens_NB, told_N, logits_NBV = carry
        # A row that has ended writes to no page of a sequence: its own may be another's by now.
        pages_BN = jnp.where(rows.going_B[:, None], given.pages_BN, NULL)
        at_B = jnp.where(rows.going_B, rows.length_B, 0)
        x_B1D, pool = model.decode(rows.token_B[:, None], pool, at_B, pages_BN)
        logits_BV = model.logits(x_B1D)[:, 0]
        length_B = at_B + 1
        forced_B = None if forced_NB is None else forced_NB[step]
        token_B, told = _chosen(logits_BV, given.choice, lambda: rows.said_BV, length_B, forced_B)
        told_N = jax.tree.map(lambda all_N, one: all_N.at[step].set(one), told_N, told)
        if logits_NBV is not None:
            logits_NBV = logits_NBV.at[step].set(logits_BV)
        tokens_NB = tokens_NB.at[step].set(jnp.where(rows.going_B, token_B, -1))
        ended_B = given.choice.stopped_by(token_B) | (length_B + 1 >= given.end_B)
        rows = Rows(
            jnp.where(rows.going_B, token_B, rows.token_B),
            jnp.where(rows.going_B, length_B, rows.length_B),
            rows.going_B & ~ended_B,
            rows.said_BV.at[jnp.arange(B), token_B].add(rows.going_B.astype(jnp.int32)),
        )
        return step + 1, pool, rows, tokens_NB, told_N, logits_NBV

    carry = (jnp.zeros((), jnp.int32), pool, rows, tokens_NB, told_N, logits_NBV)
    _, pool, rows, *results = jax.lax.while_loop(more, one, carry)
    rows = replace(rows, going_B=rows.going_B | waiting_B)
    return pool, *_everywhere((rows, *results))


def _chosen(logits_BV, choice, said, length_B, forced_B):
    """A token for each row, drawn by the position that it will have, and what is told of it."""

    def forced(token_B):
        return token_B if forced_B is None else jnp.where(forced_B < 0, token_B, forced_B)

    def likeliest():
        return forced(jnp.argmax(logits_BV, axis=1).astype(jnp.int32)), Told.none(*logits_BV.shape)

    def ruled():
        changed_BV = adjusted(logits_BV, choice, said, length_B)
        token_B = forced(sample(changed_BV, choice.keys_at(length_B), choice))
        return token_B, Told.of(logits_BV, token_B, choice.told_B.any())

    return jax.lax.cond(choice.plain, likeliest, ruled)


@jax.jit
def fetch(pool, pages_N):
    """Copies of some pages, [N, ...] of each array, counted over all shards; any past the last."""
    return _everywhere(jax.tree.map(lambda pages: pages.at[pages_N].get(mode="clip"), pool))


@partial(jax.jit, donate_argnames="pool")
def put(model, pool, pages_N, content):
    """The pool with these pages' content, as `fetch` gave it; pages past the last stay out."""
    new = jax.tree.map(lambda pages, some: pages.at[pages_N].set(some, mode="drop"), pool, content)
    attentions = [block.attention for block in model.blocks]
    return [on_mesh.placed(*pair) for pair in zip(attentions, new, strict=True)]


def _everywhere(arrays):
    """The same arrays, whole on every device of the mesh in use: any process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    return jax.lax.with_sharding_constraint(arrays, PartitionSpec())
