"""The engine's calls of the device: started in a plan's order, and read one behind.

B rows  F rows of a piece  L tokens of the longest sequence  N pages of a sequence, or steps of a
call  V vocabulary
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lrkv_jax.inference import placement, programs
from lrkv_jax.inference.pages import NULL, PAGE
from lrkv_jax.inference.request import Told
from lrkv_jax.inference.sampling import BIASES, Choice, Sampling
from lrkv_jax.inference.schedule import Plan, Scheduler, Shape
from lrkv_jax.models.transformer import Unstacked

# Ids that end a row on the device. Others of a request are found when the host reads.
STOPS = 8
# Products of fewer rows are rounded in another way.
LEAST_ROWS = 4


class Calls:
    """A model, its pool of pages and its rows on the device, and the calls that are on their way.

    rows, pages: of all shards, and of each, without the null page. longest: pages of the longest
    sequence. fill, score: shapes of the programs that read, on each shard. steps: most of a call.
    drafts: tokens that are looked up in a text and read at once. `drafted` and `accepted` count
    them, and those that the model chose.
    """

    def __init__(
        self,
        model: Unstacked,
        mesh: Mesh | None,
        *,
        rows: int,
        shards: int,
        pages: int,
        longest: int,
        fill: Shape,
        score: Shape,
        steps: int,
        drafts: int,
    ):
        self.model, self.mesh, self.steps = model, mesh, steps
        # A CPU reads one draft in a third of a step of eight rows, and eight in three steps.
        alone = jax.default_backend() == "cpu" and shards == 1
        self.how = {"most": steps, "drafts": drafts, "together": int(alone)}
        self.drafted = self.accepted = 0
        self._batch, self._shards, self._pages, self._each = rows, shards, pages, longest
        self.fill, self.score = fill, score
        self._most = max(LEAST_ROWS, fill.rows * shards)

    def forget(self) -> None:
        """Drop the cache and all that was started; the cache is made anew when it is needed."""
        self.pool: Any = None
        self.started: deque[Callable[[], Any]] = deque()
        longest = self._each * PAGE if self.how["drafts"] else 0
        self.rows = programs.Rows.none(self._batch, self.model.config.vocabulary, longest)
        self.rows = placement.everywhere(self.rows, self.mesh)

    def cache(self) -> Any:
        """The pool of pages, made if there is none."""
        if self.pool is None:
            pages = self._shards * (self._pages + 1)
            self.pool = placement.new_cache(self.model, pages, PAGE, self.mesh)
        return self.pool

    def move_nothing(self) -> None:
        """Compile what moves pages to the host and back."""
        places_N = np.full(self._each, self._shards * (self._pages + 1), np.int32)
        with jax.set_mesh(self.mesh):
            content = jax.tree.map(np.asarray, programs.fetch(self.cache(), places_N))
        self.pool = self.run(programs.put, self.pool, places_N, content)

    def read(self, ahead: int) -> None:
        """Read the answers of all calls but the last `ahead`."""
        while len(self.started) > ahead:
            self.started.popleft()()

    def run(self, program: Callable, *arguments: Any, **static: Any) -> Any:
        """Start a program that has the model."""
        with jax.set_mesh(self.mesh):
            return program(self.model, *arguments, **static)

    def start(self, plan: Plan, scheduler: Scheduler) -> None:
        """Start a plan's calls, in its order; what they answer the scheduler is told by `read`."""
        pool, answers = self.cache(), []
        self._scheduler = scheduler
        for move in plan.aside:
            with jax.set_mesh(self.mesh):
                move.request.aside = programs.fetch(pool, self._places(move))
            answers.append(partial(_to_host, move.request))
        for move in plan.back:
            _to_host(move.request)
            content, move.request.aside = move.request.aside, None
            pool = self.run(programs.put, pool, self._places(move), content)
        if plan.fills:
            pool = self._start_fill(plan, pool, answers)
        if plan.scores:
            pool = self._start_scores(plan, pool, answers)
        if plan.stepping:
            self._recall(plan.stepping[row] for row in plan.fresh)
            pool, self.rows, taken = self.run(
                programs.steps, pool, self.rows, self.given(plan), np.int32(plan.steps),
                np.bool_(plan.hurry), _forced(plan.stepping, plan.steps, (self.steps, self._batch)),
                **self.how,
            )  # fmt: skip
            turns = [(row, r, r.turn) for row, r in plan.stepping.items()]
            answers.append(partial(self._read_steps, turns, plan.steps, taken))
        self.pool = pool
        self.started.append(lambda: [answer() for answer in answers])

    def _start_fill(self, plan, pool, answers):
        tokens_FT, start_F, count_F, pages_FN, pieces = self.pieces(self.fill, plan.fills)
        pool, x_FD = self.run(
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
            log_p_FC = self.run(programs.next_log_p, x_FD, ids_FC)
            turns = {place: (request, request.turn) for place, request in nexts.items()}
            answers.append(partial(self._read_nexts, turns, log_p_FC))
        if begun:
            row_F, end_F = np.full(self._most, self._batch, np.int32), np.zeros_like(length_F)
            for place, request in begun.items():
                row_F[place], end_F[place] = request.row, request.end
            by_place = [begun.get(place) for place in range(self._most)]
            forced_1F = _forced(begun, 0, (1, self._most))
            self._recall(begun.values())
            self.rows, token_F, told_F, logits_FV = self.run(
                programs.begin, self.rows, x_FD, row_F, length_F, end_F,
                choice_of(by_place), None if forced_1F is None else forced_1F[0],
            )  # fmt: skip
            turns = [(place, request, request.turn) for place, request in begun.items()]
            chosen = jax.tree.map(lambda of_F: of_F[:, None], (token_F, told_F, logits_FV))
            answers.append(partial(self._read_tokens, turns, 0, *chosen, np.ones(self._most, int)))
        return pool

    def _start_scores(self, plan, pool, answers):
        tokens_FT, start_F, _, pages_FN, pieces = self.pieces(self.score, plan.scores)
        targets_FT = np.zeros_like(tokens_FT)
        for place, piece in pieces.items():
            targets_FT[place, : len(piece.targets)] = piece.targets
        asked = np.bool_(any(piece.request.tell is not None for piece in pieces.values()))
        pool, *scores = self.run(
            programs.score, pool, tokens_FT, start_F, pages_FN, targets_FT, asked
        )
        turns = {place: piece.request.turn for place, piece in pieces.items()}
        answers.append(partial(self._read_scores, pieces, turns, *scores))
        return pool

    def _recall(self, requests):
        """Give rows their texts so far, where penalties or drafts depend on them."""
        for request in requests:
            if self.how["drafts"] or request.draw.sampling.penalises:
                none = np.iinfo(np.int32).max
                ids_L = np.full(self._each * PAGE, none, np.int32)
                ids_L[: len(request.tokens)] = request.tokens
                chosen_L = np.zeros(len(ids_L), bool)
                chosen_L[: len(request.tokens)] = request.chosen
                said_L, read_L = np.where(chosen_L, ids_L, none), np.where(chosen_L, none, ids_L)
                with jax.set_mesh(self.mesh):
                    self.rows = programs.recall(
                        self.rows, np.int32(request.row), ids_L, said_L, read_L
                    )

    def pieces(self, shape: Shape, pieces: dict) -> tuple:
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

    def given(self, plan):
        """What the host says of each row for a call of steps."""
        B = self._batch
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
        choice = choice_of([plan.stepping.get(row) for row in range(B)])
        return programs.Given(pages_BN, end_B, live_B, fresh_B, token_B, length_B, choice)

    def _places(self, move):
        """Pages counted over all shards, padded to those of the longest request."""
        first, beyond = move.shard * (self._pages + 1), self._shards * (self._pages + 1)
        places_N = np.full(self._each, beyond, np.int32)
        places_N[: len(move.pages)] = first + np.asarray(move.pages, np.int32)
        return places_N

    def _read_steps(self, turns, count, taken):
        if self.how["drafts"]:
            self.drafted += int(taken.drafted)
            self.accepted += int(taken.accepted)
        chosen = taken.tokens_BM, taken.told_BM, taken.logits_BNV, taken.count_B
        self._read_tokens(turns, count, *chosen)

    def _read_tokens(self, turns, count, tokens_BM, told_BM, logits_BNV, count_B):
        tokens_BM, count_B = np.asarray(tokens_BM), np.asarray(count_B)
        if any(request.tell is not None for _, request, _ in turns):
            told_BM = jax.tree.map(np.asarray, told_BM)
        for place, request, turn in turns:
            tokens = tokens_BM[place, : count_B[place]].tolist()
            if request.forced:
                request.logits += list(np.asarray(logits_BNV[place, : len(tokens)]))
            before = len(request.tokens)
            self._scheduler.took(request, turn, count, tokens)
            if request.tell is not None:
                for n in range(len(request.tokens) - before):
                    request.told[before + n] = _told(request, *(of[place, n] for of in told_BM))

    def _read_nexts(self, requests, log_p_FC):
        log_p_FC = np.asarray(log_p_FC)
        for place, (request, turn) in requests.items():
            if request.turn == turn:
                request.log_p.append(log_p_FC[place, : len(request.nexts)])
            self._scheduler.answered(request, turn)

    def _read_scores(self, pieces, turns, *scores):
        log_p_FT, likeliest_FT, *tops = map(np.asarray, scores)
        for place, piece in pieces.items():
            request, n = piece.request, len(piece.targets)
            if request.turn == turns[place]:
                if request.tell is not None:
                    first = len(request.tokens) + sum(map(len, request.log_p))
                    for t in range(n):
                        of = log_p_FT[place, t], *(top[place, t] for top in tops)
                        request.told[first + t] = _told(request, *of)
                request.log_p.append(log_p_FT[place, :n])
                request.likeliest.append(likeliest_FT[place, :n])
            self._scheduler.answered(request, turns[place])


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


def _told(request, log_p, ids_K, log_p_K):
    tops = zip(ids_K[: request.tell].tolist(), log_p_K[: request.tell].tolist(), strict=True)
    return Told(float(log_p), list(tops))


def choice_of(requests):
    """The `Choice` of rows; those without a request are greedy."""
    B = len(requests)
    temperature_B, min_p_B, frequency_B, presence_B = np.zeros((4, B), np.float32)
    top_p_B, repetition_B = np.ones((2, B), np.float32)
    bias_BX = np.zeros((B, BIASES), np.float32)
    top_k_B, stream_B, least_B = np.zeros((3, B), np.int32)
    bias_ids_BX, stops_BX = (np.full((B, X), -1, np.int32) for X in (BIASES, STOPS))
    seed_B2, told_B = np.zeros((B, 2), np.uint32), np.zeros(B, bool)
    plain = True
    for row, request in enumerate(requests):
        if request is None:
            continue
        how = request.draw.sampling
        plain &= how == Sampling() and request.tell is None and not request.least
        temperature_B[row], top_k_B[row], top_p_B[row] = how.temperature, how.top_k, how.top_p
        min_p_B[row], frequency_B[row] = how.min_p, how.frequency_penalty
        presence_B[row], repetition_B[row] = how.presence_penalty, how.repetition_penalty
        bias_ids_BX[row, : len(how.bias)] = list(how.bias)
        bias_BX[row, : len(how.bias)] = list(how.bias.values())
        seed_B2[row], stream_B[row] = request.draw.key_2, request.draw.stream
        stops = sorted(request.stops)[:STOPS]
        stops_BX[row, : len(stops)] = stops
        least_B[row], told_B[row] = request.stops_from, request.tell is not None
    return Choice(
        temperature_B, top_k_B, top_p_B, min_p_B, frequency_B, presence_B, repetition_B,
        bias_ids_BX, bias_BX, seed_B2, stream_B, stops_BX, least_B, told_B, np.bool_(plain),
    )  # fmt: skip
