"""The decoding engine: one model, one pool of pages, and requests that share both.

Requests come and go at any time, and each gets the text that it would get alone: what is computed
for it depends neither on its neighbours nor on its row, its pages or a prefix that it found
(`lrkv_jax.decode.programs`). The engine starts one call ahead of the one that it reads.

B rows  D model width  F rows of a piece  N pages of a sequence  V vocabulary
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from lrkv_jax.accounting.counts import cache_bytes_per_token
from lrkv_jax.config import ModelConfig
from lrkv_jax.decode import placement, programs
from lrkv_jax.decode.pages import NULL, PAGE, Pool
from lrkv_jax.decode.request import Draw, Phase, Request, check_tokens
from lrkv_jax.decode.sampling import Choice, Sampling
from lrkv_jax.decode.schedule import Plan, Scheduler, Shape
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch
from lrkv_jax.model import with_parameters
from lrkv_jax.nn.dtype import resolve_dtype

# Tokens of prompts that are read at once: memory is linear in it. A CPU takes as long for a short
# prompt as for so many tokens, and gains little from more.
PREFILL_CHUNK = {"cpu": 128, "gpu": 512}
# Steps of one call: the host waits for none of them but the last.
STEPS_PER_CALL = 16
# Positions of a scored piece; choices of a question are a few tokens long.
SCORED = 16
# Ids that end a row on the device. Others of a request are found when the host reads.
STOPS = 8
GREEDY = Sampling()
# Products of fewer rows are rounded in another way.
LEAST_ROWS = 4
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

    pages: pages of `PAGE` tokens that the cache has for all requests together; unless given, enough
    for `batch` of the longest. aside: pages of which the host keeps copies while others use theirs;
    unless given, as many. On a `mesh` (`lrkv_jax.sharding.make_mesh`; the mesh in use, unless
    given) requests are split over `data` and `fsdp`, whose product `batch` is rounded up to, heads
    and their cache over `tensor`, and parameters as in training.

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
        aside: int | None = None,
        mesh: Mesh | None = None,
        prefill_chunk: int | None = None,
        steps_per_call: int = STEPS_PER_CALL,
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
        placement.check_parameters(config, params)
        self.config, self.length = config, length
        self.mesh = placement.mesh_for(config, mesh)
        with jax.set_mesh(self.mesh):
            params = placement.in_compute_dtype(config, params)
            self.model = placement.placed(with_parameters(config, params).unstacked(), self.mesh)
        shards = placement.shards(self.mesh)
        self.batch = batch = -(-batch // shards) * shards
        self.pages = -(-(batch * each if pages is None else pages) // shards)  # of a shard
        if self.pages < each:
            raise LrkvError(
                f"pages = {pages}: a request of {length} tokens needs {each} of {PAGE} tokens on "
                f"each of {shards} shards; use {each * shards} or more"
            )
        chunk = min(-(-prefill_chunk // PAGE) * PAGE, each * PAGE)
        # One shape, so that a text's bits do not depend on how many were read beside it.
        self._fill = Shape(chunk // PAGE, PAGE)
        self._most = max(LEAST_ROWS, self._fill.rows * shards)
        self._score = Shape(max(1, min(chunk // SCORED, batch // shards)), SCORED)
        self.steps_per_call, self._shards, self._each = steps_per_call, shards, each
        self._aside = batch * each if aside is None else aside
        self.reset()

    def reset(self) -> None:
        """Forget all requests and published pages; the cache is made anew when it is needed."""
        self.scheduler = Scheduler(
            self._empty(),
            rows=self.batch, fill=self._fill, score=self._score, steps=self.steps_per_call,
            aside=self._aside,
        )  # fmt: skip

    def _empty(self):
        """The engine's pages, with nothing in them, and nothing on its way."""
        self._pool = None
        self._started: deque[Callable[[], Any]] = deque()
        self._rows = placement.everywhere(programs.Rows.none(self.batch), self.mesh)
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
        self._check("nexts", nexts)
        # The last token of a text or of a choice is never read.
        longest = max(map(len, choices), default=new_tokens)
        self._check_length(len(prompt), longest)
        request = Request([int(token) for token in prompt], len(prompt) + new_tokens, **how)
        self.scheduler.add(request)
        return request

    def append(self, request: Request, tokens: Sequence[int], new_tokens: int) -> None:
        """Put tokens, or none, behind a held request, and go on with it for some new ones."""
        if request.phase is not Phase.HELD:
            raise LrkvError(f"the request is {request.phase.value}: only one that is held goes on")
        self._check("what is appended", tokens)
        if new_tokens < 1:
            raise LrkvError(f"new_tokens = {new_tokens}: use 1 or more")
        self._check_length(len(request.tokens) + len(tokens), new_tokens)
        request.tokens += tokens
        request.prompt = len(request.tokens)
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
            self._start(plan)
        elif not self._started:
            if not self.scheduler.idle:
                raise LrkvError("no request can go on: this is a fault of the engine, report it")
            return False
        while len(self._started) > (AHEAD if plan else 0):
            self._started.popleft()()
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
        leaves = jax.tree.leaves(self._cache())
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
            heads_split=placement.splits_heads(self.model, self.mesh),
        )

    def _check(self, name, tokens):
        check_tokens(name, tokens, self.config.vocabulary)

    def _check_length(self, tokens, more):
        if tokens + more > self.length:
            raise LrkvError(
                f"{tokens} tokens and {more} more do not fit a cache of {self.length}: shorten the "
                "prompt or make the cache longer"
            )

    # Calls.

    def _cache(self):
        if self._pool is None:
            pages = self._shards * (self.pages + 1)
            self._pool = placement.new_cache(self.model, pages, PAGE, self.mesh)
        return self._pool

    def _run(self, program, *arguments, **static):
        with jax.set_mesh(self.mesh):
            return program(self.model, *arguments, **static)

    def _start(self, plan: Plan) -> None:
        """Start a plan's calls, in its order; what they answer is read later."""
        pool, answers = self._cache(), []
        for move in plan.aside:
            with jax.set_mesh(self.mesh):
                move.request.aside = programs.fetch(pool, self._places(move))
            answers.append(partial(_to_host, move.request))
        for move in plan.back:
            _to_host(move.request)
            content, move.request.aside = move.request.aside, None
            pool = self._run(programs.put, pool, self._places(move), content)
        if plan.fills:
            pool = self._start_fill(plan, pool, answers)
        if plan.scores:
            pool = self._start_scores(plan, pool, answers)
        if plan.stepping:
            pool, self._rows, *chosen = self._run(
                programs.steps, pool, self._rows, self._given(plan), np.int32(plan.steps),
                _forced(plan.stepping, plan.steps, (self.steps_per_call, self.batch)),
                most=self.steps_per_call,
            )  # fmt: skip
            turns = [(row, r, r.turn) for row, r in plan.stepping.items()]
            answers.append(partial(self._read_steps, turns, plan.steps, *chosen))
        self._pool = pool
        self._started.append(lambda: [answer() for answer in answers])

    def _start_fill(self, plan, pool, answers):
        tokens_FT, start_F, count_F, pages_FN, pieces = self._pieces(self._fill, plan.fills)
        pool, x_FD = self._run(
            programs.fill, pool, tokens_FT, start_F, count_F, pages_FN, most=self._most
        )
        length_F = np.zeros(self._most, np.int32)
        length_F[: len(start_F)] = start_F + count_F
        last = {place: piece.request for place, piece in pieces.items() if piece.last}
        nexts = {place: request for place, request in last.items() if request.nexts}
        begun = {place: request for place, request in last.items() if not request.nexts}
        if nexts:
            most = max(len(request.nexts) for request in nexts.values())
            ids_FC = np.zeros((self._most, 1 << (most - 1).bit_length()), np.int32)
            for place, request in nexts.items():
                ids_FC[place, : len(request.nexts)] = request.nexts
            log_p_FC = self._run(programs.next_log_p, x_FD, ids_FC)
            answers.append(partial(self._read_nexts, nexts, log_p_FC))
        if begun:
            row_F, end_F = np.full(self._most, self.batch, np.int32), np.zeros_like(length_F)
            for place, request in begun.items():
                row_F[place], end_F[place] = request.row, request.end
            by_place = [begun.get(place) for place in range(self._most)]
            forced_1F = _forced(begun, 0, (1, self._most))
            self._rows, token_F, logits_FV = self._run(
                programs.begin, self._rows, x_FD, row_F, length_F, end_F,
                _choice(by_place), None if forced_1F is None else forced_1F[0],
            )  # fmt: skip
            turns = [(place, request, request.turn) for place, request in begun.items()]
            logits_1FV = None if logits_FV is None else logits_FV[None]
            answers.append(partial(self._read_steps, turns, 0, token_F[None], logits_1FV))
        return pool

    def _start_scores(self, plan, pool, answers):
        tokens_FT, start_F, _, pages_FN, pieces = self._pieces(self._score, plan.scores)
        targets_FT = np.zeros_like(tokens_FT)
        for place, piece in pieces.items():
            targets_FT[place, : len(piece.targets)] = piece.targets
        pool, log_p_FT, likeliest_FT = self._run(
            programs.score, pool, tokens_FT, start_F, pages_FN, targets_FT
        )
        answers.append(partial(self._read_scores, pieces, log_p_FT, likeliest_FT))
        return pool

    def _pieces(self, shape, pieces):
        """Arrays for a program of this shape, and each piece by its row."""
        F = shape.rows * self._shards
        tokens_FT, count_F = np.zeros((F, shape.positions), np.int32), np.ones(F, np.int32)
        start_F, pages_FN = np.zeros(F, np.int32), np.full((F, self._each), NULL, np.int32)
        by_place = {shard * shape.rows + row: piece for (shard, row), piece in pieces.items()}
        for place, piece in by_place.items():
            tokens_FT[place, : len(piece.tokens)] = piece.tokens
            start_F[place], count_F[place] = piece.start, len(piece.tokens)
            pages_FN[place, : len(piece.request.pages)] = piece.request.pages
        return tokens_FT, start_F, count_F, pages_FN, by_place

    def _given(self, plan):
        """What the host says of each row for a call of steps."""
        B = self.batch
        pages_BN = np.full((B, self._each), NULL, np.int32)
        numbers = np.zeros((3, B), np.int32)
        end_B, token_B, length_B = numbers
        live_B, fresh_B = np.zeros((2, B), bool)
        for row, request in plan.stepping.items():
            pages_BN[row, : len(request.pages)] = request.pages
            end_B[row], live_B[row] = request.end, True
            if row in plan.fresh:
                fresh_B[row], token_B[row] = True, request.tokens[-1]
                length_B[row] = len(request.tokens) - 1
        choice = _choice([plan.stepping.get(row) for row in range(B)])
        return programs.Given(pages_BN, end_B, live_B, fresh_B, token_B, length_B, choice)

    def _places(self, move):
        """Pages counted over all shards, padded to those of the longest request."""
        first, beyond = move.shard * (self.pages + 1), self._shards * (self.pages + 1)
        places_N = np.full(self._each, beyond, np.int32)
        places_N[: len(move.pages)] = first + np.asarray(move.pages, np.int32)
        return places_N

    def _read_steps(self, turns, count, tokens_NB, logits_NBV):
        tokens_NB = np.asarray(tokens_NB)
        for place, request, turn in turns:
            tokens = [token for token in tokens_NB[:, place].tolist() if token >= 0]
            if request.forced:
                request.logits += list(np.asarray(logits_NBV[: len(tokens), place]))
            self.scheduler.took(request, turn, count, tokens)

    def _read_nexts(self, requests, log_p_FC):
        log_p_FC = np.asarray(log_p_FC)
        for place, request in requests.items():
            request.log_p.append(log_p_FC[place, : len(request.nexts)])
            self.scheduler.answered(request)

    def _read_scores(self, pieces, log_p_FT, likeliest_FT):
        log_p_FT, likeliest_FT = np.asarray(log_p_FT), np.asarray(likeliest_FT)
        for place, piece in pieces.items():
            n = len(piece.targets)
            piece.request.log_p.append(log_p_FT[place, :n])
            piece.request.likeliest.append(likeliest_FT[place, :n])
            self.scheduler.answered(piece.request)


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

    `params` is the nested dict of `lrkv_jax.model.parameters`. Stop tokens end a sequence and are
    not returned. `mesh` and what is raised are as for `Engine`.
    """
    length = max((len(prompt) for prompt in prompts), default=0) + new_tokens
    engine = Engine(config, params, batch=max(1, len(prompts)), length=max(1, length), mesh=mesh)
    return engine.generate(prompts, new_tokens, sampling=sampling, seed=seed, stop=stop)


def _to_host(request):
    if request.aside is not None:
        request.aside = jax.tree.map(np.asarray, request.aside)


def _forced(requests, started, shape):
    """Tokens that requests are to take by step and row, −1 for those that choose, or None."""
    if not any(request.forced for request in requests.values()):
        return None
    forced_NB = np.full(shape, -1, np.int32)
    for place, request in requests.items():
        # What is on its way; of this call's `started` steps, or a prompt's end, nothing is yet.
        ahead = request.ahead + request.unread - (started or 1)
        taken = len(request.tokens) - request.prompt + ahead
        some = request.forced[taken : taken + shape[0]]
        forced_NB[: len(some), place] = some
    return forced_NB


def _choice(requests):
    """The `Choice` of rows; those without a request are greedy."""
    B = len(requests)
    temperature_B, top_p_B = np.zeros(B, np.float32), np.ones(B, np.float32)
    top_k_B, stream_B = np.zeros((2, B), np.int32)
    seed_B2, stops_BX = np.zeros((B, 2), np.uint32), np.full((B, STOPS), -1, np.int32)
    for row, request in enumerate(requests):
        if request is None:
            continue
        how = request.draw.sampling
        temperature_B[row], top_k_B[row], top_p_B[row] = how.temperature, how.top_k, how.top_p
        seed_B2[row], stream_B[row] = request.draw.key_2, request.draw.stream
        stops = sorted(request.stops)[:STOPS]
        stops_BX[row, : len(stops)] = stops
    return Choice(temperature_B, top_k_B, top_p_B, seed_B2, stream_B, stops_BX)
