"""The decoding engine: one model, one pool of pages, and requests that share both.

Requests come and go at any time, and each gets the text that it would get alone: what is computed
for it depends neither on the other requests nor on its slot, its pages or a shared prefix
(`lrkv_jax.inference.programs`). The engine starts one call ahead of the one that it reads.

B prompts  N tokens of a continuation  V vocabulary
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.errors import LrkvError, whole
from lrkv_jax.inference import placement
from lrkv_jax.inference.calls import STOPS, Calls, batched_params
from lrkv_jax.inference.pages import PAGE, Pool
from lrkv_jax.inference.request import (
    SEEDS,
    Ids,
    Phase,
    Request,
    RngStream,
    Sequence,
    check_tokens,
)
from lrkv_jax.inference.sampling import TOPS, Sampling
from lrkv_jax.inference.schedule import Scheduler, Shape
from lrkv_jax.kernels import dispatch
from lrkv_jax.models.accounting.counts import cache_bytes_per_token, parameter_counts
from lrkv_jax.models.accounting.serving import PREFILL_CHUNK, reserved_pages
from lrkv_jax.models.layers import resolve_dtype

# Steps of one call: the host waits for none of them but the last.
STEPS_PER_CALL = 16
# Positions of a scored chunk; choices of a question are a few tokens long.
SCORED = 16
GREEDY = Sampling()
# Calls that are started and not read.
AHEAD = 1


class Run(Protocol):
    """The parts of a trained run that an engine reads."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def params(self) -> Any: ...
    @property
    def mesh(self) -> Mesh: ...


@dataclass(frozen=True)
class EngineReport:
    """An engine's kernels, and the bytes of its cache as it was allocated, on all devices."""

    kernels: dict[str, str]  # what each kernel ran on so far in this process, and why
    cache_bytes: int
    cache_bytes_per_token: float
    cache_bytes_per_token_formula: int  # without what allocation pads


class Engine:
    """Decodes with one model: up to `batch` requests at a time, each of up to `length` tokens.

    model: a run (`load_run`), with its parameters, context and mesh unless others are given, or a
    `ModelConfig`. pages: pages of `PAGE` tokens that the cache has for all
    requests together, or, as cache_bytes, those that so much memory holds; unless given, enough for
    `batch` of the longest. host_pages: pages of which the host keeps copies while others use
    theirs; unless given, as many.
    On a `mesh` (`lrkv_jax.distributed.make_mesh`; the mesh in use, unless given) requests are split
    over `data` and `fsdp`, whose product `batch` is rounded up to, heads and their cache over
    `tensor`, and parameters as in training.

    Raises `LrkvError` for parameters of another model, a mesh that cannot split it, and requests
    that are empty, too long, or not of the model's vocabulary.
    """

    def __init__(
        self,
        model: ModelConfig | Run,
        params: Any = None,
        *,
        batch: int = 8,
        length: int | None = None,
        pages: int | None = None,
        cache_bytes: int | None = None,
        host_pages: int | None = None,
        mesh: Mesh | None = None,
        prefill_chunk: int | None = None,
        steps_per_call: int = STEPS_PER_CALL,
    ):
        if isinstance(model, ModelConfig):
            config = model
        elif not hasattr(model, "config"):
            raise LrkvError(f"an Engine of a {type(model).__name__}: give a run, as load_run reads")
        else:
            config, mesh = model.config.model, mesh or model.mesh
            params = model.params if params is None else params
            length = model.config.train.seq_len if length is None else length
        if params is None or length is None:
            raise LrkvError("an Engine of a ModelConfig needs its parameters and a length")
        each = -(-length // PAGE)  # pages of the longest request
        window = next(filter(None, config.windows), None)
        prefill_chunk = _prefill_chunk(config) if prefill_chunk is None else prefill_chunk
        sizes = {
            "batch": batch, "length": length, "pages": each if pages is None else pages,
            "prefill_chunk": prefill_chunk, "steps_per_call": steps_per_call,
        }  # fmt: skip
        for name, size in sizes.items():
            if whole(name, size) < 1:
                raise LrkvError(f"{name} = {size}: use 1 or more")
        placement.check_parameters(config, params)
        self.config, self.length = config, length
        self.mesh = placement.mesh_for(config, mesh)
        placed = placement.model_of(config, params, self.mesh)
        shards = placement.shards(self.mesh)
        self.batch = batch = -(-batch // shards) * shards
        chunk = min(-(-prefill_chunk // PAGE) * PAGE, each * PAGE)
        # In layers with a window a sequence keeps what that has, and what two calls may write.
        self._ahead = max(chunk, 2 * steps_per_call + 1)
        span = 0 if window is None else reserved_pages(length, window, self._ahead)
        window_pages = batch // shards * span  # of a shard
        of_page, of_window_page = (
            placement.page_bytes(placed, PAGE, kind) if kind in config.windows else 0
            for kind in (None, window or 0)
        )
        if cache_bytes is not None:
            of_shard = cache_bytes // shards
            if window is not None:
                rest = (of_shard - (each + 1) * of_page) // of_window_page - 1
                window_pages = max(min(rest, window_pages), 0) if of_page else rest
                of_shard -= (window_pages + 1) * of_window_page
            if of_page:
                pages = shards * (of_shard // of_page - 1)
        self.pages = -(-(batch * each if pages is None else pages) // shards)  # of a shard
        if self.pages < each or window_pages < span:
            needed = shards * ((each + 1) * of_page + (span + bool(span)) * of_window_page)
            count, there = (each, self.pages) if self.pages < each else (span, window_pages)
            raise LrkvError(
                f"a request of {length} tokens needs {needed:,} bytes of cache, {count + 1} pages "
                f"on each of {shards} shards: give more than {max(there, 0)} pages, or use a "
                "shorter length"
            )
        self._of_windows = window, window_pages + 1, span
        self.steps_per_call, self._shards = steps_per_call, shards
        self.calls = Calls(
            placed, self.mesh,
            slots=batch, shards=shards, pages=self.pages, window_pages=window_pages, longest=each,
            span=span, steps=steps_per_call,
            # One shape, so that a text's bits do not depend on how many others were read with it.
            prefill=Shape(chunk // PAGE, PAGE),
            score=Shape(max(1, min(chunk // SCORED, batch // shards)), SCORED),
        )  # fmt: skip
        self.scheduler = Scheduler(
            self._empty(),
            slots=batch, prefill=self.calls.prefill, score=self.calls.score, steps=steps_per_call,
            host_pages=batch * each if host_pages is None else host_pages,
        )  # fmt: skip

    def reset(self) -> None:
        """Cancel all requests, and drop published pages and the cache until it is needed."""
        for sequence in self.scheduler.sequences:
            self.cancel(sequence)
        self.scheduler.reset(self._empty())

    def warm(self) -> None:
        """Compile every program that requests may need; requests are canceled, pages dropped."""
        self.reset()
        penalized = Sampling(presence_penalty=1.0)
        texts = [self.submit([0], 2, sampling=sampling) for sampling in (GREEDY, penalized)]
        self.finish([*texts, self.submit([0], continuations=[[0]])])
        self.calls.compile_swaps()
        self.reset()

    def _empty(self):
        """The engine's pages, with nothing in them, and nothing on its way."""
        self.calls.reset()
        return [Pool(self.pages + 1, *self._of_windows) for _ in range(self._shards)]

    # Requests.

    def submit(self, prompt: Ids, max_tokens: int = 0, **options: Any) -> Sequence:
        """Queue a request; options are `Request`'s fields. It gets on when `advance` is called."""
        request = Request(prompt, max_tokens, **options)
        self._check_request(request)
        sequence = Sequence(request)
        try:  # a number that no array holds would end a call, with all that are in it
            batched_params([sequence])
        except (OverflowError, ValueError, TypeError) as error:
            raise LrkvError(f"a number of the request is out of range ({error})") from error
        self.scheduler.add(sequence)
        return sequence

    def _check_request(self, request):
        self._check("the prompt", request.prompt)
        if len(request.prompt) == 0:
            raise LrkvError("the prompt is empty: start it with the BOS token")
        for name in ("max_tokens", "min_tokens", "priority"):
            whole(name, getattr(request, name))
        for name, kind in (("sampling", Sampling), ("rng", RngStream)):
            if not isinstance(given := getattr(request, name), kind):
                raise LrkvError(f"{name} = {given!r}: give a {kind.__name__}")
        if request.max_tokens < 1 and not request.continuations:
            raise LrkvError(f"max_tokens = {request.max_tokens}: use 1 or more")
        for number, continuation in enumerate(request.continuations):
            self._check(f"continuation {number}", continuation)
            if len(continuation) == 0:
                raise LrkvError(f"continuation {number} is empty: give one token or more")
        self._check("stop_token_ids", list(request.stop_token_ids))
        self._check("bias", list(request.sampling.bias))
        self._check("forced", request.forced)
        if not 0 <= (request.logprobs or 0) <= TOPS:
            raise LrkvError(f"logprobs = {request.logprobs}: use 0 to {TOPS}")
        if not isinstance(request.rng.seed, int | np.integer):
            raise LrkvError(f"seed = {request.rng.seed!r}: use a whole number")
        if not -SEEDS <= request.rng.seed < SEEDS:
            raise LrkvError(f"seed = {request.rng.seed}: use a number below 2^63")
        min_tokens, stops = request.min_tokens, len(request.stop_token_ids)
        if not 0 <= min_tokens <= max(request.max_tokens, 0):
            raise LrkvError(
                f"min_tokens = {min_tokens}: use 0 to max_tokens = {request.max_tokens}"
            )
        if min_tokens and len(request.forced):
            raise LrkvError("min_tokens with forced: no token is sampled, so give one of the two")
        if min_tokens and stops > STOPS:
            raise LrkvError(f"min_tokens with {stops} stop tokens: give up to {STOPS} of them")
        # The last token of a text or of a continuation is never read.
        longest = max(map(len, request.continuations), default=request.max_tokens)
        if len(request.continuations) > 1 and not self.scores_together(longest):
            raise LrkvError(
                f"several continuations, one of {longest} tokens, of a model with windows: score "
                f"one at a time, or give prefill_chunk = {longest} or more"
            )
        self._check_length(len(request.prompt), longest)

    def scores_together(self, longest: int) -> bool:
        """Whether continuations of up to `longest` tokens may be of one request, with windows."""
        return longest <= self._ahead or not any(self.config.windows)

    def append(
        self,
        sequence: Sequence,
        tokens: Ids,
        max_tokens: int,
        *,
        same_turn: bool = False,
    ) -> None:
        """Append tokens, or none, to a retained sequence, and continue it by some new ones.

        What follows is another answer, as if all before were its prompt; with `same_turn` the last
        one goes on, as behind what a tool gave it, and penalties and `min_tokens` go on counting.
        """
        if sequence.phase is not Phase.RETAINED:
            raise LrkvError(
                f"the sequence is {sequence.phase.value}: only a retained one can be appended to"
            )
        if sequence.request.continuations:
            raise LrkvError("the sequence was scored: only one that was continued can go on")
        self._check("what is appended", tokens)
        if whole("max_tokens", max_tokens) < 1:
            raise LrkvError(f"max_tokens = {max_tokens}: use 1 or more")
        self._check_length(len(sequence.tokens) + len(tokens), max_tokens)
        before = len(sequence.tokens)
        sequence.tokens += tokens
        sequence.prompt_length = len(sequence.tokens)
        if same_turn:
            sequence.inserted.append(range(before, sequence.prompt_length))
        else:
            sequence.answer_start, sequence.inserted = sequence.prompt_length, []
        sequence.max_length = sequence.prompt_length + max_tokens
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence, *, retain: int = 0) -> None:
        """End a sequence wherever it is; with `retain` it keeps so many of its tokens cached."""
        if sequence.phase is not Phase.ENDED:
            reason = sequence.result.finish_reason or "cancelled"
            self.scheduler.finish(sequence, reason, retain=retain)

    def advance(self, watched: bool = True) -> bool:
        """Start the next call, and read the one before; False when there is nothing to do.

        Texts that nobody watches before they have ended wait until prompts are read.
        Whatever stops it half way, Ctrl-C too, the requests can go on: what was cached is read
        again.
        """
        try:
            return self._advance(watched)
        except BaseException:
            self.scheduler.reset(self._empty())
            raise

    def _advance(self, watched):
        plan = self.scheduler.plan(watched)
        if plan:
            self.calls.start(plan, self.scheduler)
        elif not self.calls.started:
            if not self.scheduler.idle:
                raise LrkvError("no request can go on: this is a fault of the engine, report it")
            return False
        self.calls.read(AHEAD if plan else 0)
        return True

    def finish(self, sequences: abc.Sequence[Sequence]) -> None:
        """Advance until these sequences are done."""
        while not all(sequence.done for sequence in sequences):
            if not self.advance(watched=False):
                raise LrkvError("a sequence is not of this engine: submit its request to it")

    # Batches of texts.

    def stream(
        self,
        prompts: abc.Sequence[Ids],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop: Ids = (),
    ) -> Iterator[list[list[int]]]:
        """Yield the tokens of each prompt that are new since the last time, until all have ended.

        `stop` lists the tokens that end a text, and are not yielded. Text i draws from (seed, i)
        and its positions alone.
        """
        how = {"sampling": sampling, "seed": seed, "stop": stop}
        with self._submitted(prompts, max_new_tokens, **how) as sequences:
            shown = [0] * len(sequences)
            while not all(sequence.done for sequence in sequences):
                self.advance()
                pairs = zip(sequences, shown, strict=True)
                new = [sequence.output_ids[start:] for sequence, start in pairs]
                shown = [start + len(some) for start, some in zip(shown, new, strict=True)]
                if any(new):
                    yield new

    def generate(self, prompts: abc.Sequence[Ids], max_new_tokens: int, **how) -> list[list[int]]:
        """The new tokens of each prompt, without the stop token; arguments as for `stream`."""
        with self._submitted(prompts, max_new_tokens, **how) as sequences:
            self.finish(sequences)
            return [sequence.output_ids for sequence in sequences]

    @contextmanager
    def _submitted(self, prompts, max_tokens, *, sampling=GREEDY, seed=0, stop=(), forced=None):
        """A sequence for each prompt; whatever happens, none goes on after the block."""
        sequences: list[Sequence] = []
        options = {"sampling": sampling, "stop_token_ids": frozenset(stop)}
        try:
            for i, prompt in enumerate(prompts):
                options["rng"] = RngStream(seed, i)
                if forced is not None:
                    options["forced"] = forced[i]
                sequences.append(self.submit(prompt, max_tokens, **options))
            yield sequences
        finally:
            for sequence in sequences:
                self.cancel(sequence)

    def forced_logits(
        self,
        prompts: abc.Sequence[Ids],
        continuations: abc.Sequence[Ids],
    ) -> Float[np.ndarray, "B N V"]:
        """Float32 logits of the N tokens of each continuation, from the programs that decode.

        The continuations, of one length, take the place of what would be sampled: logits [b, n]
        are those from which token n of `continuations[b]` would be.
        """
        lengths = sorted({len(continuation) for continuation in continuations})
        if len(continuations) != len(prompts) or len(lengths) != 1:
            raise LrkvError(
                f"{len(continuations)} continuations of {lengths} tokens for {len(prompts)} "
                "prompts: give one for each, all of one length"
            )
        with self._submitted(prompts, lengths[0], forced=continuations) as sequences:
            self.finish(sequences)
            return np.stack([sequence.result.logits for sequence in sequences])

    def report(self) -> EngineReport:
        """The engine's report, with the bytes of the cache summed from its live buffers."""
        return EngineReport(
            kernels=dispatch.choices(),
            cache_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(self.calls.cache())),
            cache_bytes_per_token=self.calls.cache_bytes_per_token(),
            cache_bytes_per_token_formula=cache_bytes_per_token(
                self.config, resolve_dtype(self.config.dtype).itemsize
            ),
        )

    def _check(self, name, tokens):
        check_tokens(name, tokens, self.config.vocabulary)

    def _check_length(self, tokens, more):
        if tokens + more > self.length:
            raise LrkvError(
                f"{tokens} tokens and {more} more do not fit a cache of {self.length}: shorten the "
                "prompt or make the cache longer"
            )


def _prefill_chunk(config):
    """Tokens of prompts that are read at once: memory is linear in it."""
    # A CPU takes as long for a short prompt, and only small models gain by more: 1.2 to 1.3.
    if jax.default_backend() != "cpu":
        return PREFILL_CHUNK
    return 256 if parameter_counts(config).total < 16_000_000 else 128
