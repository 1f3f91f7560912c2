"""The scheduler: slots, pages and chunks of prompts, shared out among sequences.

Pure Python, a function of the sequences and of what was read: it never reads the device. What was
started and not read is counted in advance (`steps_in_flight`, `reads_in_flight`), so that a call
can be planned while another runs.

First come, first served, among equal priorities. A sequence starts when a slot is free and when its
prompt and the text that is expected of it find pages. If texts grow longer than expected, the
youngest is preempted: its pages are swapped out to the host and come back as they were, so that its
text does not change. The oldest is never preempted, so one always advances.
"""

from __future__ import annotations

from bisect import insort
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from lrkv_jax.inference.pages import PAGE, Pool, digests
from lrkv_jax.inference.request import Phase, Sequence

# Of the tokens that a request may be given, the share that it is expected to take at first.
EXPECTED = 0.7
# Calls that read prompts, at most, between two that decode, which take as long for one text as for
# all: while somebody watches, and else.
READS, READS_UNWATCHED = 8, 64
# How much a text that ends moves the expected share.
LEARNT = 0.1
# Steps of a call while somebody waits, or reads and leaves rows empty: the fewest worth a call.
SHORTEST = 4
# A sequence that was preempted this often starts again when all that it may need is there.
PATIENCE = 3


class Shape(NamedTuple):
    """Rows of each shard, and positions of a row, of a program that reads text."""

    rows: int
    positions: int


class PrefillChunk(NamedTuple):
    """A stretch of one sequence's text, for a row of a program that reads.

    The tokens stand at `start` and what follows; `targets` are to be scored, and `last` marks
    the end of the prompt.
    """

    sequence: Sequence
    start: int
    tokens: abc.Sequence[int]
    targets: abc.Sequence[int] = ()
    last: bool = False


class PageMove(NamedTuple):
    """Pages of a shard whose content goes to `sequence.swapped`, or comes from there.

    `window_pages` are theirs, if layers have windows, but for the first ones, `released` before.
    """

    sequence: Sequence
    shard: int
    pages: list[int]
    window_pages: list[int]
    released: int


@dataclass
class SchedulerOutput:
    """The calls to make next, in this order. Chunks by (shard, row) of their program's shape."""

    swap_out: list[PageMove] = field(default_factory=list)  # to the host
    swap_in: list[PageMove] = field(default_factory=list)  # and from it
    prefills: dict[tuple[int, int], PrefillChunk] = field(default_factory=dict)
    scores: dict[tuple[int, int], PrefillChunk] = field(default_factory=dict)
    steps: int = 0
    stop_early: bool = False  # end the steps when a slot is free: somebody waits
    decoding: dict[int, Sequence] = field(default_factory=dict)  # by slot
    fresh: set[int] = field(default_factory=set)  # slots whose token and length the host gives

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.prefills or self.scores or self.decoding)


class Scheduler:
    """Sequences in `slots` slots, shared out evenly among `pools`, one a shard of the sequences.

    prefill: the shape of the program that reads prompts; score: of the one that scores. steps: most
    steps of a call. host_pages: pages of which the host keeps copies; beyond them preempted
    sequences are recomputed.
    """

    def __init__(
        self,
        pools: abc.Sequence[Pool],
        *,
        slots: int,
        prefill: Shape,
        score: Shape,
        steps: int,
        host_pages: int,
    ):
        self.pools = pools
        self._prefill, self._score = prefill, score
        self.steps = steps  # of the next call, at most
        self._slots: list[Sequence | None] = [None] * slots
        self._queue: list[Sequence] = []
        self._retained: list[Sequence] = []
        self._number = 0
        self._expected, self._read = EXPECTED, 0
        self._host_pages = host_pages
        self._fresh: set[int] = set()
        self.last = SchedulerOutput()
        self.preemptions = 0
        self.recomputed_tokens = 0  # of preempted sequences that the host had no room for

    # What clients do.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or a retained one that was appended to."""
        if sequence.number < 0:
            sequence.number, self._number = self._number, self._number + 1
            sequence.digests = digests(sequence.tokens)
        if sequence in self._retained:
            self._retained.remove(sequence)
        sequence.result.finish_reason, sequence.turn = "", sequence.turn + 1
        self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: str, *, retain: int = 0) -> None:
        """End a sequence wherever it is; its slot is another's now.

        With `retain` it is retained, with its pages and so many of its tokens.
        """
        if sequence in self._queue:
            self._queue.remove(sequence)
        if sequence in self._retained:
            self._retained.remove(sequence)
        self._leave_slot(sequence)
        sequence.result.finish_reason = reason
        sequence.phase = Phase.RETAINED if retain else Phase.ENDED
        if retain:
            del sequence.tokens[retain:]
            # The last one is read again, with what is appended: its next is chosen then.
            sequence.cached = min(sequence.cached, len(sequence.tokens) - 1)
            # Pages of the prompt that others may find must not be written to again.
            untouched = (retain - 1) // PAGE
            cut = untouched < len(sequence.digests)
            del sequence.digests[untouched:]
            released = sequence.out_of_window
            if cut or (released and self._out_of_window(sequence) < released):
                self._drop(sequence)
            self._retained.append(sequence)
        else:
            self._drop(sequence)

    def reset(self, pools: abc.Sequence[Pool]) -> None:
        """The pages were lost: whoever is not done is recomputed, into these."""
        self.pools, running, self._expected = pools, self.running, EXPECTED
        for sequence in self.sequences:
            self._leave_slot(sequence)
            self.recomputed_tokens += sequence.cached
            sequence.pages = []  # of pools that are gone: nobody takes them back
            self._drop(sequence)
            sequence.steps_in_flight = sequence.reads_in_flight = sequence.scored = 0
            sequence.result.log_p, sequence.result.is_greedy = [], []
        for sequence in running:
            self._enqueue(sequence)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queue and not any(self._slots)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a slot."""
        return len(self._queue)

    @property
    def sequences(self) -> list[Sequence]:
        """All that run, wait or are retained."""
        return [*self.running, *self._queue, *self._retained]

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a slot, the first one first."""
        return sorted((sequence for sequence in self._slots if sequence), key=_order)

    # What is done next.

    def plan(self, watched: bool = True) -> SchedulerOutput:
        """The next call of each kind, taken as done; `watched` as in `Engine.advance`."""
        self.last = plan = SchedulerOutput()
        self._admit(plan)
        reading = any(sequence.phase is Phase.PREFILLING for sequence in self.running)
        most = READS if watched else READS_UNWATCHED
        self._read = (self._read + 1) % (most + 1) if reading else 0
        self._plan_calls(plan)
        if not plan and self._read:  # what was to be read was preempted
            self._read = 0
            self._plan_calls(plan)
        decoding = plan.decoding.values()
        if reading:
            plan.steps = min(plan.steps, SHORTEST)
        # Tokens that are forced are counted in advance: all of their steps are taken.
        if self._queue and decoding and not any(sequence.request.forced for sequence in decoding):
            plan.stop_early = True
            soonest = min(map(_left, decoding))
            plan.steps = min(plan.steps, max(soonest, SHORTEST))
        for sequence in decoding:
            sequence.steps_in_flight += plan.steps
        return plan

    def record_tokens(
        self, sequence: Sequence, turn: int, started: int, tokens: abc.Sequence[int]
    ) -> None:
        """Append what `started` steps of a turn sampled, or, if 0, what follows the prompt."""
        if started:
            sequence.steps_in_flight -= started
        else:
            sequence.reads_in_flight -= 1
        if sequence.done or sequence.turn != turn:
            return
        reason = ""
        for token in tokens:
            sequence.tokens.append(token)
            stops = token in sequence.request.stop_token_ids
            if stops and len(sequence.tokens) > sequence.min_length_before(token):
                reason = "stop"
            elif len(sequence.tokens) >= sequence.max_length:
                reason = "length"
            if reason:
                break
        if sequence.pages or sequence.swapped_pages:  # not one that will be recomputed
            sequence.cached = len(sequence.tokens) - 1  # the last one was chosen, and never read
        if reason:
            new = len(sequence.tokens) - sequence.prompt_length
            share = new / (sequence.max_length - sequence.prompt_length)
            self._expected += LEARNT * (share - self._expected)
            self.finish(sequence, reason, retain=sequence.request.retain and len(sequence.tokens))

    def record_score(self, sequence: Sequence) -> None:
        """A chunk was scored. What is scored has one turn."""
        sequence.reads_in_flight -= 1
        if sequence.done or sequence.reads_in_flight:
            return
        if sequence.scored == len(self._score_chunks(sequence)):
            self.finish(sequence, "scored", retain=sequence.request.retain and len(sequence.tokens))

    # Slots.

    def _enqueue(self, sequence):
        sequence.phase = Phase.QUEUED
        insort(self._queue, sequence, key=_order)

    def _admit(self, plan):
        """Give slots to those who come next; nobody overtakes one whose pages are not free yet."""
        while self._queue:
            sequence = self._queue[0]
            found = self._find_slot(sequence, plan)
            if found is None:
                return
            slot, shared = found
            self._queue.remove(sequence)
            self._start(sequence, slot, shared, plan)

    def _find_slot(self, sequence, plan):
        """(a free slot, pages that a shared prefix fills) for a sequence, or None."""
        if sequence.steps_in_flight or sequence.reads_in_flight:
            return None
        free = [slot for slot, there in enumerate(self._slots) if there is None]
        if sequence.pages:  # retained: its pages are one shard's
            free = [slot for slot in free if self._shard(slot) == sequence.shard]
        slots = {self._shard(slot): slot for slot in reversed(free)}
        fits = []
        for shard, slot in slots.items():
            pool, shared = self.pools[shard], self._shared_prefix(sequence, shard)
            needed = max(_pages(self._expected_of(sequence)), sequence.swapped_pages)
            needed -= len(shared) + len(sequence.pages)
            others = [r for r in self._slots if r and r.shard == shard]
            needed += sum(max(0, _pages(self._expected_of(r)) - len(r.pages)) for r in others)
            taken = sum(pool.holders(page) == 0 for page in shared)
            in_windows = sum(self._window_pages_needed(r, pool) for r in (sequence, *others))
            while (needed > pool.free - taken or in_windows > pool.free_window_pages) and (
                retained := self._retained_in(shard, sequence)
            ):
                self._swap_out(retained[0], plan)
            room = pool.free - taken
            if (needed <= room and in_windows <= pool.free_window_pages) or not others:
                fits.append((len(shared), room, slot, shared))
        return max(fits, key=lambda fit: fit[:2])[2:] if fits else None

    def _shared_prefix(self, sequence, shard):
        """Pages of a prefix; at least one token of the prompt is left to read."""
        if sequence.pages or sequence.swapped_pages:
            return []
        full_pages = (len(sequence.tokens) - 1) // PAGE
        return self.pools[shard].shared(sequence.digests[:full_pages])

    def _start(self, sequence, slot, shared, plan):
        self._slots[slot], sequence.slot, sequence.shard = sequence, slot, self._shard(slot)
        pool = self.pools[sequence.shard]
        if sequence.swapped_pages:
            sequence.pages = pool.take(sequence.swapped_pages, sequence.out_of_window)
            plan.swap_in.append(self._move(sequence))
            self._host_pages += sequence.swapped_pages
            sequence.swapped_pages = 0
        elif shared:
            sequence.out_of_window = pool.hold(shared)
            sequence.pages, sequence.cached = shared, len(shared) * PAGE
            if not sequence.result.preemptions:  # else they may be its own
                sequence.result.cached_tokens = sequence.cached
        if (
            len(sequence.tokens) > sequence.prompt_length
            and sequence.cached == len(sequence.tokens) - 1
        ):
            sequence.phase = Phase.DECODING
            self._fresh.add(slot)
        elif self._target(sequence) > sequence.cached:
            sequence.phase = Phase.PREFILLING
        else:
            sequence.phase = Phase.SCORING

    def _leave_slot(self, sequence):
        if sequence.slot is not None:
            self._fresh.discard(sequence.slot)
            self._slots[sequence.slot] = sequence.slot = None

    def _drop(self, sequence):
        if sequence.pages:
            self.pools[sequence.shard].give_back(sequence.pages, sequence.out_of_window)
        self._host_pages += sequence.swapped_pages
        sequence.pages, sequence.swapped_pages, sequence.swapped, sequence.cached = [], 0, None, 0
        sequence.out_of_window = 0

    # Pages.

    def _allocate(self, sequence, tokens, plan):
        """Whether a sequence has pages for so many tokens now; younger ones may be preempted."""
        pool, needed = self.pools[sequence.shard], _pages(tokens) - len(sequence.pages)
        self._release_window_pages(sequence)
        while needed > min(pool.free, pool.free_window_pages):
            retained = self._retained_in(sequence.shard, sequence)
            running = [r for r in self.running if r.shard == sequence.shard]
            victim = retained[0] if retained else running[-1]
            self._swap_out(victim, plan)
            if victim is sequence:
                return False
        sequence.pages += pool.take(max(0, needed))
        return True

    def _out_of_window(self, sequence):
        """The first pages that no window of the sequence reaches any more.

        Nor does a call that is on its way: each reads on from tokens that are cached. Each of
        several continuations begins at the prompt's end.
        """
        read, scored = sequence.cached, sequence.scored
        if sequence.phase is Phase.SCORING and len(sequence.request.continuations) == 1:
            read = len(sequence.tokens) - 1 + scored * self._score.positions
        return min(self.pools[sequence.shard].out_of_window(read), len(sequence.pages))

    def _release_window_pages(self, sequence):
        count, pool = self._out_of_window(sequence), self.pools[sequence.shard]
        pool.release_window_pages(sequence.pages[sequence.out_of_window : count])
        sequence.out_of_window = max(sequence.out_of_window, count)

    def _move(self, sequence):
        pages, released = list(sequence.pages), sequence.out_of_window
        window_pages = self.pools[sequence.shard].window_pages_of(pages, released)
        return PageMove(sequence, sequence.shard, pages, window_pages[released:], released)

    def _swap_out(self, sequence, plan):
        """Take a sequence's pages, and its slot if it has one; their content goes to the host."""
        self._release_window_pages(sequence)
        pages = sequence.pages
        returning = [move for move in plan.swap_in if move.sequence is sequence]
        if returning:  # it came in just now: the host still has its copies
            plan.swap_in.remove(returning[0])
            pages = returning[0].pages
        # A continuation that is half scored is in no text to be recomputed from.
        elif len(pages) <= self._host_pages or sequence.phase is Phase.SCORING:
            plan.swap_out.append(self._move(sequence))
        else:
            pages = []
        self._host_pages -= len(pages)
        sequence.swapped_pages = len(pages)
        self.pools[sequence.shard].give_back(sequence.pages, sequence.out_of_window)
        sequence.pages = []
        if returning:  # what was released since is on the host too
            sequence.out_of_window = returning[0].released
        if not pages:
            self.recomputed_tokens += sequence.cached
            sequence.cached = sequence.out_of_window = 0
        if sequence.slot is not None:
            self._leave_slot(sequence)
            sequence.result.preemptions += 1
            self.preemptions += 1
            self._enqueue(sequence)

    def _retained_in(self, shard, sequence):
        """Sequences without a slot that keep pages in a shard, except for this one."""
        others = (r for r in (*self._retained, *self._queue) if r is not sequence)
        return [r for r in others if r.pages and r.shard == shard]

    def _expected_of(self, sequence):
        """Tokens that a sequence will probably be; all that it may be, once preempted often."""
        new = max(sequence.max_length - len(sequence.tokens), 0)
        if sequence.result.preemptions < PATIENCE:
            new = round(self._expected * new)
        return len(sequence.tokens) + max(new, *map(len, sequence.request.continuations), 1)

    def _window_pages_needed(self, sequence, pool):
        """Window pages that a sequence will probably take in addition to those that it holds."""
        released = sequence.out_of_window
        pages = max(_pages(self._expected_of(sequence)), sequence.swapped_pages)
        held = max(0, len(sequence.pages) - released)  # none while they are on the host
        return max(0, min(pool.span, pages - released) - held)

    def _shard(self, slot):
        return slot * len(self.pools) // len(self._slots)

    # Calls.

    def _plan_calls(self, plan):
        """In the order of coming: what an older one needs, a younger one has not used yet."""
        for sequence in self.running:
            if sequence.slot is None:  # it was preempted meanwhile
                continue
            if sequence.phase is Phase.PREFILLING:
                self._plan_prefill(sequence, plan)
            elif sequence.phase is Phase.SCORING:
                self._plan_score(sequence, plan)
            elif sequence.phase is Phase.DECODING and not self._read:
                self._plan_decode(sequence, plan)

    def _target(self, sequence):
        """Tokens to read before the sequence goes on; scoring reads the last one again."""
        return len(sequence.tokens) - bool(sequence.request.continuations)

    def _plan_prefill(self, sequence, plan):
        """Read on, in as many rows as are left: each sees what those before it write."""
        target = self._target(sequence)
        first = sum(shard == sequence.shard for shard, _ in plan.prefills)
        rows = self._prefill.rows - first
        stop = min(target, sequence.cached + rows * self._prefill.positions)
        if stop == sequence.cached or not self._allocate(sequence, stop, plan):
            return
        begin, last = sequence.cached, stop == target and not sequence.request.continuations
        for place, start in enumerate(range(begin, stop, self._prefill.positions), first):
            tokens = sequence.tokens[start : min(start + self._prefill.positions, stop)]
            ends = last and start + len(tokens) == stop
            plan.prefills[sequence.shard, place] = PrefillChunk(sequence, start, tokens, last=ends)
        sequence.cached = stop
        for page in range(begin // PAGE, min(stop // PAGE, len(sequence.digests))):
            self.pools[sequence.shard].publish(sequence.pages[page], sequence.digests[page])
        if last:
            sequence.reads_in_flight += 1
            sequence.phase = Phase.DECODING
        elif stop == target:
            sequence.phase = Phase.SCORING

    def _plan_score(self, sequence, plan):
        place = sum(shard == sequence.shard for shard, _ in plan.scores)
        chunks = self._score_chunks(sequence)
        if place == self._score.rows or sequence.scored == len(chunks):
            return
        continuation, begin = chunks[sequence.scored]
        targets = continuation[begin : begin + self._score.positions]
        tokens = [sequence.tokens[-1], *continuation][begin : begin + len(targets)]
        start = len(sequence.tokens) - 1 + begin
        if not self._allocate(sequence, start + len(tokens), plan):
            return
        plan.scores[sequence.shard, place] = PrefillChunk(sequence, start, tokens, targets)
        sequence.scored += 1
        sequence.reads_in_flight += 1

    def _score_chunks(self, sequence):
        size, continuations = self._score.positions, sequence.request.continuations
        return [(c, begin) for c in continuations for begin in range(0, len(c), size)]

    def _plan_decode(self, sequence, plan):
        left = _left(sequence)
        if left <= 0:
            return
        # The last token is sampled and never read. One call is not read yet.
        most = sequence.cached + sequence.steps_in_flight + self.steps
        most = min(most, sequence.max_length - 1)
        if not self._allocate(sequence, most, plan):
            return
        plan.steps = max(plan.steps, min(left, self.steps))
        plan.decoding[sequence.slot] = sequence
        if sequence.slot in self._fresh:
            self._fresh.remove(sequence.slot)
            plan.fresh.add(sequence.slot)


def _order(sequence):
    return sequence.request.priority, sequence.number


def _left(sequence):
    """Tokens that are still to be sampled, and that no call samples yet."""
    in_flight = sequence.reads_in_flight + sequence.steps_in_flight
    return sequence.max_length - len(sequence.tokens) - in_flight


def _pages(tokens):
    return -(-tokens // PAGE)
