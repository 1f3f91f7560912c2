"""A request in three objects: the client's request, the scheduler's state, and the result."""

from __future__ import annotations

import enum
from collections import abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.sampling import Sampling

Ids = abc.Sequence[int]


SEEDS = 1 << 63  # what a key's two words tell apart: from -SEEDS to SEEDS - 1


class RngStream(NamedTuple):
    """A stream of random numbers: token n is drawn from the seed, the stream and n alone."""

    seed: int = 0
    stream: int = 0


class TokenLogprobs(NamedTuple):
    """A token's log p under the model, and the likeliest tokens in its place with theirs."""

    log_p: float
    tops: list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class Request:
    """Token ids to continue, or whose continuations to score.

    stop_token_ids: ids that end the text once it has `min_tokens`. pauses: those of them that stop
    it at any length, to go on behind what a tool gives. logprobs: how many of the
    likeliest tokens to report next to each sampled one, at most `sampling.TOPS`; None reports
    nothing. continuations: texts to score, instead of new tokens. forced: tokens that are taken
    instead of sampled ones, whose logits are kept. retain: whether the cache stays when it is done,
    to be appended to. Requests of lower `priority` come first, then those that came first.
    """

    prompt: Ids
    max_tokens: int = 0
    sampling: Sampling = Sampling()
    rng: RngStream = RngStream()
    stop_token_ids: frozenset[int] = frozenset()
    pauses: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    continuations: abc.Sequence[Ids] = ()
    forced: Ids = ()
    retain: bool = False
    priority: int = 0

    def __post_init__(self):
        for name in ("continuations", "forced"):  # an array is not true or false
            object.__setattr__(self, name, list(getattr(self, name)))


@dataclass
class Result:
    """The result of a request, except for its tokens, which are `Sequence.output_ids`."""

    finish_reason: str = ""  # stop, length, scored or cancelled
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by place in the tokens
    log_p: list[np.ndarray] = field(default_factory=list)  # of scored tokens, chunk by chunk
    is_greedy: list[np.ndarray] = field(default_factory=list)  # whether each is the likeliest
    logits: list[np.ndarray] = field(default_factory=list)  # [V] of each forced token
    cached_tokens: int = 0  # of the prompt, whose pages another request had filled
    preemptions: int = 0


class Phase(enum.Enum):
    """The phase of a sequence: it waits, its prompt is read, it is decoded or scored, or ended."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SCORING = "scoring"
    RETAINED = "retained"  # done for now: it keeps its cache, and may be appended to
    ENDED = "ended"


@dataclass(eq=False)
class Sequence:
    """A request in the engine: its tokens so far, its slot and its pages.

    tokens: the prompt and all that follows it, the token that stopped it included. max_length: how
    many they may be. prompt_length: those that were given, of the last turn.
    """

    request: Request
    tokens: list[int] = field(init=False)
    max_length: int = field(init=False)
    result: Result = field(default_factory=Result)
    phase: Phase = Phase.QUEUED
    prompt_length: int = 0
    answer_start: int = 0  # tokens before what the turn's answer begins with
    inserted: list[range] = field(default_factory=list)  # places of its answer that were given
    number: int = -1  # in the order of coming
    turn: int = 0  # of `append`; what comes of an earlier one is not read
    shard: int | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    out_of_window: int = 0  # the first of `pages`, whose window pages were released
    digests: list[bytes] = field(default_factory=list)  # of the prompt's pages
    cached: int = 0  # tokens whose keys and values are in the pages
    steps_in_flight: int = 0  # steps that were started and not read
    reads_in_flight: int = 0  # scored chunks and prompts' ends that were started and not read
    scored: int = 0  # chunks of continuations that were started
    swapped_pages: int = 0  # pages whose content is on the host, in `swapped`
    swapped: Any = None

    def __post_init__(self):
        self.tokens = [int(token) for token in self.request.prompt]
        self.prompt_length = self.answer_start = len(self.tokens)
        self.max_length = self.prompt_length + self.request.max_tokens

    @property
    def output_ids(self) -> list[int]:
        """The new tokens since the last turn, without the one that stopped it."""
        new = self.tokens[self.prompt_length :]
        return new[:-1] if self.result.finish_reason == "stop" else new

    def min_length_before(self, stop: int) -> int:
        """The length up to which a stop is not to come: `min_tokens` of the answer are sampled."""
        if stop in self.request.pauses:
            return 0
        return self.answer_start + sum(map(len, self.inserted)) + self.request.min_tokens

    @property
    def is_sampled(self) -> list[bool]:
        """For each token, whether it was sampled in this turn: penalties count those."""
        inserted = {place for span in self.inserted for place in span}
        return [n >= self.answer_start and n not in inserted for n in range(len(self.tokens))]

    @property
    def done(self) -> bool:
        """Whether nothing more comes by itself."""
        return self.phase in (Phase.RETAINED, Phase.ENDED)


def check_tokens(name: str, tokens: Any, vocabulary: int, axes: int = 1) -> None:
    """Raise `LrkvError` for what is no array of token ids, and for an id that the model lacks."""
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise LrkvError(f"{name} holds lists of different lengths: give them one by one") from None
    if not 1 <= ids.ndim <= axes:
        raise LrkvError(f"{name} is {str(tokens)[:60]}: give a list of token ids")
    if ids.size and ids.dtype.kind not in "iu":
        raise LrkvError(
            f"{name} holds {ids.dtype} values: give token ids, as a tokenizer makes them"
        )
    bad = ids[(ids < 0) | (ids >= vocabulary)]
    if bad.size:
        raise LrkvError(
            f"{name} has the token id {bad.flat[0]}, and the model's are 0 to {vocabulary - 1}: "
            "use the tokenizer that it was trained with"
        )
