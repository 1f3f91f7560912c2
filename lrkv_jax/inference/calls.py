"""The engine's calls of the device: started in the scheduler's order, and read one behind.

B slots  F rows of a program that reads  L tokens of the longest sequence  N pages of a sequence, or
steps of a call  V vocabulary
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lrkv_jax.inference import placement, programs
from lrkv_jax.inference.pages import NULL, PAGE
from lrkv_jax.inference.request import TokenLogprobs
from lrkv_jax.inference.sampling import BIASES, BatchedSamplingParams, Sampling
from lrkv_jax.inference.schedule import PageMove, Scheduler, SchedulerOutput, Shape
from lrkv_jax.inference.slots import SlotState, StepInputs
from lrkv_jax.models.transformer import Unstacked

# Ids that end a slot on the device. Others of a request are found when the host reads.
STOPS = 8
# Products of fewer rows are rounded in another way.
MIN_PRODUCT_ROWS = 4


class Calls:
    """A model, its pool of pages and its slots on the device, and the calls that are on their way.

    slots, pages: of all shards, and of each, without the null page. window_pages: those of layers
    with a window, of each shard. longest, span: the most pages of a sequence, and window pages.
    prefill, score: shapes of the programs that read, on each shard. steps: most of a call.
    """

    def __init__(
        self,
        model: Unstacked,
        mesh: Mesh | None,
        *,
        slots: int,
        shards: int,
        pages: int,
        window_pages: int,
        longest: int,
        span: int,
        prefill: Shape,
        score: Shape,
        steps: int,
    ):
        self.model, self.mesh, self.steps = model, mesh, steps
        self._batch, self._shards, self._each = slots, shards, longest
        # Of layers of each window: pages of a shard, the null page too, and most of a sequence.
        self._windows = windows = model.config.windows
        self._rows = tuple(1 + (pages if w is None else window_pages) for w in windows)
        self._moved = tuple(longest if w is None else span for w in windows)
        self.prefill, self.score = prefill, score
        self._most = max(MIN_PRODUCT_ROWS, prefill.rows * shards)

    def reset(self) -> None:
        """Drop the cache and all that was started; the cache is made again when it is needed."""
        self.pool: Any = None
        self.started: deque[Callable[[], Any]] = deque()
        self.slots = SlotState.none(self._batch, self.model.config.vocabulary)
        self.slots = placement.replicated(self.slots, self.mesh)

    def cache(self) -> Any:
        """The pool of pages, made if there is none."""
        if self.pool is None:
            pages = [self._shards * rows for rows in self._rows]
            self.pool = placement.new_cache(self.model, pages, PAGE, self.mesh)
        return self.pool

    def cache_bytes_per_token(self) -> float:
        """Bytes of one token in all layers, from the live buffers."""
        return sum(
            leaf.nbytes / (PAGE * self._shards * rows)
            for rows, cache in zip(self.model.by_layer(self._rows), self.cache(), strict=True)
            for leaf in jax.tree.leaves(cache)
        )

    def compile_swaps(self) -> None:
        """Compile what moves pages to the host and back."""
        places = self._places(PageMove(None, 0, [], [], 0))
        content = jax.tree.map(np.asarray, self.run(programs.swap_out, self.cache(), places))
        self.pool = self.run(programs.swap_in, self.pool, places, content)

    def read(self, ahead: int) -> None:
        """Read the answers of all calls but the last `ahead`."""
        while len(self.started) > ahead:
            self.started.popleft()()

    def run(self, program: Callable, *arguments: Any, **static: Any) -> Any:
        """Start a program that has the model."""
        with jax.set_mesh(self.mesh):
            return program(self.model, *arguments, **static)

    def start(self, plan: SchedulerOutput, scheduler: Scheduler) -> None:
        """Start a plan's calls, in its order; `read` reports their answers to the scheduler."""
        pool, answers = self.cache(), []
        self._scheduler = scheduler
        for move in plan.swap_out:
            move.sequence.swapped = self.run(programs.swap_out, pool, self._places(move))
            answers.append(partial(_to_host, move.sequence))
        for move in plan.swap_in:
            _to_host(move.sequence)
            content, move.sequence.swapped = move.sequence.swapped, None
            pool = self.run(programs.swap_in, pool, self._places(move), content)
        if plan.prefills:
            pool = self._start_prefill(plan, pool, answers)
        if plan.scores:
            pool = self._start_scores(plan, pool, answers)
        if plan.decoding:
            self._load_history(plan.decoding[slot] for slot in plan.fresh)
            pool, self.slots, outputs = self.run(
                programs.decode, pool, self.slots, self.step_inputs(plan), np.int32(plan.steps),
                np.bool_(plan.stop_early),
                _forced(plan.decoding, plan.steps, (self.steps, self._batch)),
                most=self.steps,
            )  # fmt: skip
            turns = [(slot, one, one.turn) for slot, one in plan.decoding.items()]
            answers.append(partial(self._read_steps, turns, plan.steps, outputs))
        self.pool = pool
        self.started.append(lambda: [answer() for answer in answers])

    def _start_prefill(self, plan, pool, answers):
        *arrays, chunks = self.chunk_arrays(self.prefill, plan.prefills)
        _, start_F, count_F, _ = arrays
        pool, x_FD = self.run(programs.prefill, pool, *arrays, most=self._most)
        length_F = np.zeros(self._most, np.int32)
        length_F[: len(start_F)] = start_F + count_F
        begun = {place: chunk.sequence for place, chunk in chunks.items() if chunk.last}
        if begun:
            slot_F, end_F = np.full(self._most, self._batch, np.int32), np.zeros_like(length_F)
            for place, sequence in begun.items():
                slot_F[place], end_F[place] = sequence.slot, sequence.max_length
            by_place = [begun.get(place) for place in range(self._most)]
            forced_1F = _forced(begun, 0, (1, self._most))
            self._load_history(begun.values())
            self.slots, *first = self.run(
                programs.first_token, self.slots, x_FD, slot_F, length_F, end_F,
                batched_params(by_place), None if forced_1F is None else forced_1F[0],
            )  # fmt: skip
            turns = [(place, one, one.turn) for place, one in begun.items()]
            answers.append(partial(self._read_tokens, turns, 0, *first, np.ones(self._most, int)))
        return pool

    def _start_scores(self, plan, pool, answers):
        tokens_FT, start_F, _, pages_FN, chunks = self.chunk_arrays(self.score, plan.scores)
        targets_FT = np.zeros_like(tokens_FT)
        for place, chunk in chunks.items():
            targets_FT[place, : len(chunk.targets)] = chunk.targets
        pool, *scores = self.run(programs.score, pool, tokens_FT, start_F, pages_FN, targets_FT)
        answers.append(partial(self._read_scores, chunks, *scores))
        return pool

    def _load_history(self, sequences):
        """Give slots their texts so far, where penalties depend on them."""
        for sequence in sequences:
            if sequence.request.sampling.penalizes:
                none = np.iinfo(np.int32).max
                ids_L = np.full(self._each * PAGE, none, np.int32)
                ids_L[: len(sequence.tokens)] = sequence.tokens
                sampled_L = np.zeros(len(ids_L), bool)
                sampled_L[: len(sequence.tokens)] = sequence.is_sampled
                output_L = np.where(sampled_L, ids_L, none)
                prompt_L = np.where(sampled_L, none, ids_L)
                with jax.set_mesh(self.mesh):
                    self.slots = programs.load_history(
                        self.slots, np.int32(sequence.slot), output_L, prompt_L
                    )

    def chunk_arrays(self, shape: Shape, chunks: dict) -> tuple:
        """Arrays for a program of this shape, and each chunk by its row."""
        F = shape.rows * self._shards
        tokens_FT, count_F = np.zeros((F, shape.positions), np.int32), np.ones(F, np.int32)
        start_F = np.zeros(F, np.int32)
        by_place = {shard * shape.rows + row: chunk for (shard, row), chunk in chunks.items()}
        for place, chunk in by_place.items():
            tokens_FT[place, : len(chunk.tokens)] = chunk.tokens
            start_F[place], count_F[place] = chunk.start, len(chunk.tokens)
        pages_FN = self._tables(F, {place: one.sequence for place, one in by_place.items()})
        return tokens_FT, start_F, count_F, pages_FN, by_place

    def _tables(self, rows, sequences):
        """The page tables of sequences by row, one for the layers of each window."""
        tables = tuple(np.full((rows, self._each), NULL, np.int32) for _ in self._rows)
        for place, sequence in sequences.items():
            for window, table in zip(self._windows, tables, strict=True):
                pages = sequence.pages
                if window is not None:
                    pool = self._scheduler.pools[sequence.shard]
                    pages = pool.window_pages_of(pages, sequence.out_of_window)
                table[place, : len(pages)] = pages
        return tables

    def step_inputs(self, plan):
        """The host's inputs for each slot of a call of steps."""
        B = self._batch
        numbers = np.zeros((3, B), np.int32)
        end_B, token_B, length_B = numbers
        scheduled_B, fresh_B = np.zeros((2, B), bool)
        for slot, sequence in plan.decoding.items():
            end_B[slot], scheduled_B[slot] = sequence.max_length, True
            if slot in plan.fresh:
                fresh_B[slot], token_B[slot] = True, sequence.tokens[-1]
                length_B[slot] = len(sequence.tokens) - 1
        params = batched_params([plan.decoding.get(slot) for slot in range(B)])
        pages_BN = self._tables(B, plan.decoding)
        return StepInputs(pages_BN, end_B, scheduled_B, fresh_B, token_B, length_B, params)

    def _places(self, move):
        """Pages counted over all shards, padded to the most of a sequence: as `_tables`."""
        found = []
        kinds = zip(self._windows, self._rows, self._moved, strict=True)
        for window, rows, most in kinds:
            pages = move.pages if window is None else move.window_pages
            places_N = np.full(most, self._shards * rows, np.int32)
            places_N[: len(pages)] = move.shard * rows + np.asarray(pages, np.int32)
            found.append(places_N)
        return tuple(found)

    def _read_steps(self, turns, count, outputs):
        arrays = outputs.tokens_BN, outputs.logprobs_BN, outputs.logits_BNV, outputs.count_B
        self._read_tokens(turns, count, *arrays)

    def _read_tokens(self, turns, count, tokens_BN, logprobs_BN, logits_BNV, count_B):
        tokens_BN, count_B = np.asarray(tokens_BN), np.asarray(count_B)
        if any(sequence.request.logprobs is not None for _, sequence, _ in turns):
            logprobs_BN = jax.tree.map(np.asarray, logprobs_BN)
        if logits_BNV is not None:
            logits_BNV = np.asarray(logits_BNV)
        for place, sequence, turn in turns:
            tokens = tokens_BN[place, : count_B[place]].tolist()
            if sequence.request.forced:
                sequence.result.logits += list(logits_BNV[place, : len(tokens)])
            before = len(sequence.tokens)
            self._scheduler.record_tokens(sequence, turn, count, tokens)
            if sequence.request.logprobs is not None:
                for n in range(len(sequence.tokens) - before):
                    one = _token_logprobs(sequence, *(of[place, n] for of in logprobs_BN))
                    sequence.result.logprobs[before + n] = one

    def _read_scores(self, chunks, *scores):
        log_p_FT, is_greedy_FT = map(np.asarray, scores)
        for place, chunk in chunks.items():
            result, n = chunk.sequence.result, len(chunk.targets)
            result.log_p.append(log_p_FT[place, :n])
            result.is_greedy.append(is_greedy_FT[place, :n])
            self._scheduler.record_score(chunk.sequence)


def _to_host(sequence):
    if sequence.swapped is not None:
        sequence.swapped = jax.tree.map(np.asarray, sequence.swapped)


def _forced(sequences, started, shape):
    """Tokens that sequences are to take by step and slot, −1 where one is sampled, or None."""
    if not any(sequence.request.forced for sequence in sequences.values()):
        return None
    forced_NB = np.full(shape, -1, np.int32)
    for place, sequence in sequences.items():
        # What is on its way; of this call's `started` steps, or a prompt's end, nothing
        # is yet.
        in_flight = sequence.steps_in_flight + sequence.reads_in_flight - (started or 1)
        known = len(sequence.tokens) - sequence.prompt_length + in_flight
        some = sequence.request.forced[known : known + shape[0]]
        forced_NB[: len(some), place] = some
    return forced_NB


def _token_logprobs(sequence, log_p, ids_K, log_p_K):
    K = sequence.request.logprobs
    tops = zip(ids_K[:K].tolist(), log_p_K[:K].tolist(), strict=True)
    return TokenLogprobs(float(log_p), list(tops))


@lru_cache(maxsize=1024)
def _key_data(seed):
    """`jax.random.key`'s for a seed of 32 bits; of a longer one it would drop the rest."""
    return np.array([int(seed) >> 32 & 0xFFFFFFFF, int(seed) & 0xFFFFFFFF], np.uint32)


def batched_params(sequences):
    """The `BatchedSamplingParams` of slots; those without a sequence are greedy."""
    B = len(sequences)
    temperature_B, min_p_B, frequency_B, presence_B = np.zeros((4, B), np.float32)
    top_p_B, repetition_B = np.ones((2, B), np.float32)
    bias_BX = np.zeros((B, BIASES), np.float32)
    top_k_B, stream_B = np.zeros((2, B), np.int32)
    min_length_BX = np.zeros((B, STOPS), np.int32)
    bias_ids_BX, stops_BX = (np.full((B, X), -1, np.int32) for X in (BIASES, STOPS))
    seed_B2, logprobs_B = np.zeros((B, 2), np.uint32), np.zeros(B, bool)
    plain = True
    for slot, sequence in enumerate(sequences):
        if sequence is None:
            continue
        request, how = sequence.request, sequence.request.sampling
        plain &= how == Sampling() and request.logprobs is None and not request.min_tokens
        temperature_B[slot], top_k_B[slot], top_p_B[slot] = how.temperature, how.top_k, how.top_p
        min_p_B[slot], frequency_B[slot] = how.min_p, how.frequency_penalty
        presence_B[slot], repetition_B[slot] = how.presence_penalty, how.repetition_penalty
        bias_ids_BX[slot, : len(how.bias)] = list(how.bias)
        bias_BX[slot, : len(how.bias)] = list(how.bias.values())
        seed_B2[slot], stream_B[slot] = _key_data(request.rng.seed), request.rng.stream
        stops = sorted(request.stop_token_ids)[:STOPS]
        stops_BX[slot, : len(stops)] = stops
        for place, stop in enumerate(stops):
            min_length_BX[slot, place] = sequence.min_length_before(stop)
        logprobs_B[slot] = request.logprobs is not None
    return BatchedSamplingParams(
        temperature_B, top_k_B, top_p_B, min_p_B, frequency_B, presence_B, repetition_B,
        bias_ids_BX, bias_BX, seed_B2, stream_B, stops_BX, min_length_BX, logprobs_B,
        np.bool_(plain),
    )  # fmt: skip
