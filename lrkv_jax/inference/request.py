"""What a client asks of the engine, and what has come of it so far."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.pages import Digest
from lrkv_jax.inference.sampling import Sampling


class Phase(enum.Enum):
    """Where a request is: it waits, its text is read, it is continued or scored, or neither."""

    QUEUED = "queued"
    FILLING = "filling"
    STEPPING = "stepping"
    SCORING = "scoring"
    HELD = "held"  # done for now: it keeps its cache, and may be appended to
    ENDED = "ended"


@dataclass(frozen=True)
class Draw:
    """How tokens are chosen: those of a stream of a seed's draws, by position alone."""

    sampling: Sampling = Sampling()
    seed: int = 0
    stream: int = 0

    @property
    def key_2(self) -> UInt32[np.ndarray, "2"]:
        """The seed as a key's data."""
        return _key_data(self.seed)


class Told(NamedTuple):
    """A token's log p under the model, and the likeliest tokens in its place with theirs."""

    log_p: float
    tops: list[tuple[int, float]]


@dataclass(eq=False)
class Request:
    """Token ids to continue, or whose continuations to score.

    tokens: the prompt, and all that was chosen after it. end: how many it may be, at most. stops:
    ids that end it, once it has `least` tokens; the one that did is the last of `tokens`. tell: of
    how many of the likeliest tokens to tell beside each one that is chosen, at most
    `sampling.TOPS`; None tells nothing. choices: continuations to score, in
    place of new tokens. nexts: ids whose log p to give, each as the next one. forced: tokens that
    are taken in place of chosen ones, whose logits are kept. keep: whether the cache stays when it
    is done, to be appended to. Requests of lower `priority` come first, then those that came first.
    """

    tokens: list[int]
    end: int
    draw: Draw = Draw()
    stops: frozenset[int] = frozenset()
    least: int = 0
    tell: int | None = None
    choices: Sequence[Sequence[int]] = ()
    nexts: Sequence[int] = ()
    forced: Sequence[int] = ()
    keep: bool = False
    priority: int = 0

    # What has come of it.
    phase: Phase = Phase.QUEUED
    reason: str = ""  # stop, length, cancelled, or what it was refused for
    prompt: int = 0  # tokens that were given, of the last turn
    told: dict[int, Told] = field(default_factory=dict)  # by place in `tokens`, or after them
    log_p: list[np.ndarray] = field(default_factory=list)
    likeliest: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # [V] of each forced token
    from_prefix: int = 0  # tokens whose pages another request had filled
    preempted: int = 0

    # The scheduler's.
    number: int = -1
    since: int = 0  # tokens before what the turn's answer begins with
    given: list[range] = field(default_factory=list)  # places of its answer that were not chosen
    shard: int | None = None
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    chain: list[Digest] = field(default_factory=list)
    cached: int = 0  # tokens whose entries are in the pages
    ahead: int = 0  # steps that were started and not read
    scored: int = 0  # pieces of `choices` that were started
    unread: int = 0  # pieces and prompts' ends that were started and not read
    turn: int = 0  # of `append`; what comes of an earlier one is not read
    copied: int = 0  # pages whose content is on the host, in `aside`
    aside: Any = None

    def __post_init__(self):
        self.prompt = self.since = len(self.tokens)

    @property
    def said(self) -> list[int]:
        """The new tokens since the last turn, without the one that stopped it."""
        new = self.tokens[self.prompt :]
        return new[:-1] if self.reason == "stop" else new

    @property
    def stops_from(self) -> int:
        """The length up to which no stop ends it: `least` tokens of the answer were not chosen."""
        return self.since + sum(map(len, self.given)) + self.least

    @property
    def chosen(self) -> list[bool]:
        """Of each token whether the model chose it, in this turn: penalties count those."""
        given = {place for span in self.given for place in span}
        return [n >= self.since and n not in given for n in range(len(self.tokens))]

    @property
    def done(self) -> bool:
        """Whether nothing more comes by itself."""
        return self.phase in (Phase.HELD, Phase.ENDED)


def check_tokens(name: str, tokens: Any, vocabulary: int) -> None:
    """Raise `LrkvError` for a token id that the model does not have."""
    ids = np.asarray(tokens, None if len(tokens) else np.int32)
    if ids.dtype.kind not in "iu":
        raise LrkvError(
            f"{name} holds {ids.dtype} values: give token ids, as a tokenizer makes them"
        )
    bad = ids[(ids < 0) | (ids >= vocabulary)]
    if bad.size:
        raise LrkvError(
            f"{name} has the token id {bad.flat[0]}, and the model's are 0 to {vocabulary - 1}: "
            "use the tokenizer that it was trained with"
        )


@functools.lru_cache(maxsize=1024)
def _key_data(seed):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))
