"""The decoding engine: one model, one pool of pages, and requests that share both.

Requests come and go at any time, and each gets the text that it would get alone: what is computed
for it depends neither on its neighbours nor on its row, its pages or a prefix that it found
(`lrkv_jax.inference.programs`). The engine starts one call ahead of the one that it reads.

B prompts  N tokens of a continuation  V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import placement, programs
from lrkv_jax.inference.calls import STOPS, Calls, choice_of
from lrkv_jax.inference.pages import PAGE, Pool
from lrkv_jax.inference.request import Draw, Phase, Request, check_tokens
from lrkv_jax.inference.sampling import TOPS, Sampling
from lrkv_jax.inference.schedule import Scheduler, Shape
from lrkv_jax.kernels import dispatch
from lrkv_jax.kernels.gpu.plan import MOST_QUERIES
from lrkv_jax.models.accounting.counts import cache_bytes_per_token
from lrkv_jax.models.layers import resolve_dtype

# Tokens of prompts that are read at once: memory is linear in it. A CPU takes as long for a short
# prompt as for so many tokens, and gains little from more.
PREFILL_CHUNK = {"cpu": 128, "gpu": 512}
# Steps of one call: the host waits for none of them but the last.
STEPS_PER_CALL = 16
# Positions of a scored piece; choices of a question are a few tokens long.
SCORED = 16
GREEDY = Sampling()
# Calls that are started and not read.
AHEAD = 1


@dataclass(frozen=True)
class EngineReport:
    """What an engine decodes with, and what its cache occupies as it was allocated."""

    decode_kernel: str  # as asked for: `ModelConfig.decode_kernel`
    kernels: dict[str, str]  # what each kernel ran on so far in this process, and why
    cache_bytes: int
    cache_bytes_per_token: float
    cache_bytes_per_token_formula: int  # without what allocation pads
    cache_bytes_per_device: int
    mesh: dict[str, int]  # empty without one
    heads_split: bool  # each tensor shard attends with its own heads


class Engine:
    """Decodes with one model: up to `batch` requests at a time, each of up to `length` tokens.

    pages: pages of `PAGE` tokens that the cache has for all requests together, or, as cache_bytes,
    those that so much memory holds; unless given, enough for `batch` of the longest. aside: pages
    of which the host keeps copies while others use theirs; unless given, as many. drafts: tokens
    that are looked up in a text (`lrkv_jax.inference.lookup`) and read at once, in place of a step
    each, where it repeats itself. On a `mesh`
    (`lrkv_jax.distributed.make_mesh`; the mesh in use, unless given) requests are split over `data`
    and `fsdp`, whose product `batch` is rounded up to, heads and their cache over `tensor`, and
    parameters as in training.

    Raises `LrkvError` for parameters of another model, a mesh that cannot split it, and requests
    that are empty, too long, or not of the model's vocabulary.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        *,
        batch: int,
        length: int,
        pages: int | None = None,
        cache_bytes: int | None = None,
        aside: int | None = None,
        mesh: Mesh | None = None,
        prefill_chunk: int | None = None,
        steps_per_call: int = STEPS_PER_CALL,
        drafts: int = 0,
    ):
        each = -(-length // PAGE)  # pages of the longest request
        if prefill_chunk is None:
            prefill_chunk = PREFILL_CHUNK.get(jax.default_backend(), PREFILL_CHUNK["gpu"])
        sizes = {
            "batch": batch, "length": length, "pages": each if pages is None else pages,
            "prefill_chunk": prefill_chunk, "steps_per_call": steps_per_call,
        }  # fmt: skip
        for name, size in sizes.items():
            if size < 1:
                raise LrkvError(f"{name} = {size}: use 1 or more")
        if not 0 <= drafts < MOST_QUERIES:
            raise LrkvError(f"drafts = {drafts}: use 0 (none) to {MOST_QUERIES - 1}")
        placement.check_parameters(config, params)
        self.config, self.length = config, length
        self.mesh = placement.mesh_for(config, mesh)
        model = placement.model_of(config, params, self.mesh)
        shards = placement.shards(self.mesh)
        self.batch = batch = -(-batch // shards) * shards
        if cache_bytes is not None:
            pages = cache_bytes // placement.page_bytes(model, PAGE) - shards
        self.pages = -(-(batch * each if pages is None else pages) // shards)  # of a shard
        if self.pages < each:
            needed = (each + 1) * shards * placement.page_bytes(model, PAGE)
            raise LrkvError(
                f"a request of {length} tokens needs {needed:,} bytes of cache, {each + 1} pages "
                f"on each of {shards} shards: give more than {max(self.pages, 0)} pages, or use a "
                "shorter length"
            )
        chunk = min(-(-prefill_chunk // PAGE) * PAGE, each * PAGE)
        # One shape, so that a text's bits do not depend on how many were read beside it.
        self._fill = Shape(chunk // PAGE, PAGE)
        self._score = Shape(max(1, min(chunk // SCORED, batch // shards)), SCORED)
        self.steps_per_call, self._shards = steps_per_call, shards
        self._more = programs.most_taken(steps_per_call, drafts) - steps_per_call
        self._aside = batch * each if aside is None else aside
        self.calls = Calls(
            model, self.mesh,
            rows=batch, shards=shards, pages=self.pages, longest=each,
            fill=self._fill, score=self._score, steps=steps_per_call, drafts=drafts,
        )  # fmt: skip
        self.reset()

    def reset(self) -> None:
        """Forget all requests and published pages; the cache is made anew when it is needed."""
        self.scheduler = Scheduler(
            self._empty(),
            rows=self.batch, fill=self._fill, score=self._score, steps=self.steps_per_call,
            more=self._more, aside=self._aside,
        )  # fmt: skip

    def warm(self) -> None:
        """Compile every program that requests may need; requests and pages are forgotten."""
        self.reset()
        penalised = Draw(Sampling(presence_penalty=1.0))
        texts = [self.submit([0], 2, draw=draw) for draw in (Draw(), penalised)]
        self.finish([*texts, self.submit([0], choices=[[0]])])
        self.calls.move_nothing()
        self.reset()

    def _empty(self):
        """The engine's pages, with nothing in them, and nothing on its way."""
        self.calls.forget()
        return [Pool(self.pages + 1) for _ in range(self._shards)]

    # Requests.

    def submit(self, prompt: Sequence[int], new_tokens: int = 0, **how: Any) -> Request:
        """Queue a request; keywords are `Request`'s. It gets on whenever `advance` is called."""
        choices, nexts = how.get("choices", ()), how.get("nexts", ())
        self._check("the prompt", prompt)
        if len(prompt) == 0:
            raise LrkvError("the prompt is empty: start it with the BOS token")
        if new_tokens < 1 and not (choices or len(nexts)):
            raise LrkvError(f"new_tokens = {new_tokens}: use 1 or more")
        for number, choice in enumerate(choices):
            self._check(f"continuation {number}", choice)
            if len(choice) == 0:
                raise LrkvError(f"continuation {number} is empty: give one token or more")
        self._check("stop", list(how.get("stops", ())))
        self._check("bias", list(how.get("draw", Draw()).sampling.bias))
        if not 0 <= (how.get("tell") or 0) <= TOPS:
            raise LrkvError(f"tell = {how['tell']}: use 0 to {TOPS}")
        if not 0 <= how.get("least", 0) <= max(new_tokens, 0):
            raise LrkvError(f"least = {how['least']}: use 0 to new_tokens = {new_tokens}")
        if how.get("least") and len(how.get("stops", ())) > STOPS:
            raise LrkvError(f"least with {len(how['stops'])} stops: give up to {STOPS} stops")
        self._check("nexts", nexts)
        # The last token of a text or of a choice is never read.
        longest = max(map(len, choices), default=new_tokens)
        self._check_length(len(prompt), longest)
        request = Request([int(token) for token in prompt], len(prompt) + new_tokens, **how)
        try:  # a number that no array holds would end a call, with all that are in it
            choice_of([request])
        except (OverflowError, ValueError, TypeError) as error:
            raise LrkvError(f"a number of the request is out of range ({error})") from error
        self.scheduler.add(request)
        return request

    def append(
        self, request: Request, tokens: Sequence[int], new_tokens: int, *, same_turn: bool = False
    ) -> None:
        """Put tokens, or none, behind a held request, and go on with it for some new ones.

        What follows is another answer, as if all before were its prompt; with `same_turn` the last
        one goes on, as behind what a tool gave it, and penalties and `least` go on counting.
        """
        if request.phase is not Phase.HELD:
            raise LrkvError(f"the request is {request.phase.value}: only one that is held goes on")
        self._check("what is appended", tokens)
        if new_tokens < 1:
            raise LrkvError(f"new_tokens = {new_tokens}: use 1 or more")
        self._check_length(len(request.tokens) + len(tokens), new_tokens)
        before = len(request.tokens)
        request.tokens += tokens
        request.prompt = len(request.tokens)
        if same_turn:
            request.given.append(range(before, request.prompt))
        else:
            request.since, request.given = request.prompt, []
        request.end = request.prompt + new_tokens
        self.scheduler.add(request)

    def cancel(self, request: Request, *, keep: int = 0) -> None:
        """End a request wherever it is; with `keep` it is held, with so many of its tokens."""
        if request.phase is not Phase.ENDED:
            self.scheduler.finish(request, request.reason or "cancelled", keep=keep)

    def advance(self) -> bool:
        """Start the next call, and read the one before; False when there is nothing to do.

        Whatever stops it half way, Ctrl-C too, the requests can go on: what was cached is read
        again.
        """
        try:
            return self._advance()
        except BaseException:
            self.scheduler.forget(self._empty())
            raise

    def _advance(self):
        plan = self.scheduler.plan()
        if plan:
            self.calls.start(plan, self.scheduler)
        elif not self.calls.started:
            if not self.scheduler.idle:
                raise LrkvError("no request can go on: this is a fault of the engine, report it")
            return False
        self.calls.read(AHEAD if plan else 0)
        return True

    def finish(self, requests: Sequence[Request]) -> None:
        """Advance until these requests are done."""
        while not all(request.done for request in requests):
            self.advance()

    # Batches of texts.

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        draws: Sequence[int] | None = None,
        stop: Sequence[int] = (),
    ) -> Iterator[list[list[int]]]:
        """Yield the tokens of each prompt that are new since the last time, until all have ended.

        `stop` lists the tokens that end a text, and are not yielded. Text i draws from (seed,
        draws[i], or i) and its positions alone.
        """
        numbers = range(len(prompts)) if draws is None else draws
        requests: list[Request] = []
        try:
            for prompt, n in zip(prompts, numbers, strict=True):
                how = {"draw": Draw(sampling, seed, n), "stops": frozenset(stop)}
                requests.append(self.submit(prompt, new_tokens, **how))
            shown = [0] * len(requests)
            while not all(shown[i] == len(r.said) and r.done for i, r in enumerate(requests)):
                self.advance()
                new = [request.said[n:] for request, n in zip(requests, shown, strict=True)]
                shown = [n + len(some) for n, some in zip(shown, new, strict=True)]
                if any(new):
                    yield new
        finally:
            for request in requests:
                self.cancel(request)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, **how) -> list[list[int]]:
        """The new tokens of each prompt, without the stop token; arguments as for `stream`."""
        texts: list[list[int]] = [[] for _ in prompts]
        for new in self.stream(prompts, new_tokens, **how):
            for text, some in zip(texts, new, strict=True):
                text += some
        return texts

    def forced_logits(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> Float[np.ndarray, "B N V"]:
        """Float32 logits of the N tokens of each continuation, from the programs that decode.

        The continuations, of one length, take the place of what would be sampled: logits [b, n]
        are those from which token n of `continuations[b]` would be.
        """
        if len(continuations) != len(prompts) or len({len(c) for c in continuations}) != 1:
            raise LrkvError(
                f"{len(continuations)} continuations of {sorted({len(c) for c in continuations})} "
                f"tokens for {len(prompts)} prompts: give one for each, all of one length"
            )
        requests = []
        for row, (prompt, forced) in enumerate(zip(prompts, continuations, strict=True)):
            self._check(f"continuation {row}", forced)
            requests.append(self.submit(prompt, len(forced), forced=forced))
        self.finish(requests)
        return np.stack([request.logits for request in requests])

    def report(self) -> EngineReport:
        """What runs, and the bytes of the cache, summed from its live buffers."""
        leaves = jax.tree.leaves(self.calls.cache())
        total = sum(leaf.nbytes for leaf in leaves)
        return EngineReport(
            decode_kernel=self.config.decode_kernel,
            kernels=dispatch.choices(),
            cache_bytes=total,
            cache_bytes_per_token=total / (self._shards * (self.pages + 1) * PAGE),
            cache_bytes_per_token_formula=cache_bytes_per_token(
                self.config, resolve_dtype(self.config.dtype).itemsize
            ),
            cache_bytes_per_device=sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
            mesh=dict(self.mesh.shape) if self.mesh else {},
            heads_split=placement.splits_heads(self.calls.model, self.mesh),
        )

    def _check(self, name, tokens):
        check_tokens(name, tokens, self.config.vocabulary)

    def _check_length(self, tokens, more):
        if tokens + more > self.length:
            raise LrkvError(
                f"{tokens} tokens and {more} more do not fit a cache of {self.length}: shorten the "
                "prompt or make the cache longer"
            )


def generate(
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Sequence[int] = (),
    mesh: Mesh | None = None,
) -> list[list[int]]:
    """New token ids for each prompt of token ids, decoded together from one cache.

    `params` is the nested dict of `lrkv_jax.models.transformer.parameters`. Stop tokens end a
    sequence and are not returned. `mesh` and what is raised are as for `Engine`.
    """
    length = max((len(prompt) for prompt in prompts), default=0) + new_tokens
    engine = Engine(config, params, batch=max(1, len(prompts)), length=max(1, length), mesh=mesh)
    return engine.generate(prompts, new_tokens, sampling=sampling, seed=seed, stop=stop)
