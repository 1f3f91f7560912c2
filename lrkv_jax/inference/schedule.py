"""Who is decoded next: rows, pages and pieces of prompts, shared out among requests.

Pure Python, a function of the requests and of what was read: it never asks the device. What the
device was told and has not answered is counted in advance (`ahead`, `unread`), so that a call can
be planned while another runs.

Whoever came first is served first, among equal priorities. A request enters when a row is free and
when its prompt and the text that is expected of it find pages. If texts grow longer than expected,
the youngest gives way: its pages are put aside on the host and come back as they were, so that its
text does not change. The oldest never gives way, so somebody always gets on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lrkv_jax.inference.pages import PAGE, Pool, digests
from lrkv_jax.inference.request import Phase, Request

EXPECTED = 0.7
READS = 8
# How much a text that ends moves the expected share.
LEARNT = 0.1
# Steps of a call while somebody waits: the fewest that are worth a call.
SHORTEST = 4
# A request that gave way this often enters again when all that it may need is there.
PATIENCE = 3


class Shape(NamedTuple):
    """Rows of a shard, and positions, of a program that reads text."""

    rows: int
    positions: int


class Piece(NamedTuple):
    """A stretch of one request's text for a row of a program.

    The tokens stand at `start` and what follows; `targets` are to be scored, and `last` says that
    the prompt ends here.
    """

    request: Request
    start: int
    tokens: Sequence[int]
    targets: Sequence[int] = ()
    last: bool = False


class Move(NamedTuple):
    """Pages of a shard whose content goes to `request.aside`, or comes from there."""

    request: Request
    shard: int
    pages: list[int]


@dataclass
class Plan:
    """What to do next, in this order. Pieces by (shard, row) of their program's shape."""

    aside: list[Move] = field(default_factory=list)  # to the host
    back: list[Move] = field(default_factory=list)  # and from it
    fills: dict[tuple[int, int], Piece] = field(default_factory=dict)
    scores: dict[tuple[int, int], Piece] = field(default_factory=dict)
    steps: int = 0
    hurry: bool = False  # somebody waits for a row: end the steps when one is free
    stepping: dict[int, Request] = field(default_factory=dict)  # by row
    fresh: set[int] = field(default_factory=set)  # rows whose token and length the host gives

    def __bool__(self) -> bool:
        return bool(self.aside or self.back or self.fills or self.scores or self.stepping)


class Scheduler:
    """Requests on `rows` rows, shared out evenly among `pools`, one a shard of the sequences.

    fill: the shape of the program that reads prompts; score: of the one that scores. steps: most
    steps of a call; each gives a row a token, and a call may give it up to `more` beyond them.
    aside: pages of which the host keeps copies; beyond them a request that gives way is read again.
    expected: of what a request may be given, the share that it is expected to take, before any has
    ended. reads: calls that read prompts, at most, between two of steps: more of them fill the rows
    sooner, and let others wait.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        rows: int,
        fill: Shape,
        score: Shape,
        steps: int,
        more: int = 0,
        aside: int,
        expected: float = EXPECTED,
        reads: int = READS,
    ):
        self.pools = pools
        self._fill, self._score = fill, score
        self.steps = steps  # of the next call, at most
        self._more = more
        self._rows: list[Request | None] = [None] * rows
        self._queue: list[Request] = []
        self._held: list[Request] = []
        self._number = 0
        self._expected, self._reads, self._read = expected, reads, 0
        self._aside_left = aside
        self._fresh: set[int] = set()
        self.last = Plan()
        self.gave_way = 0  # times that a request did
        self.read_again = 0  # tokens, of requests that gave way when the host had no room

    # What clients do.

    def add(self, request: Request) -> None:
        """Queue a request, or a held one that was appended to."""
        if request.number < 0:
            request.number, self._number = self._number, self._number + 1
            request.chain = digests(request.tokens)
        if request in self._held:
            self._held.remove(request)
        request.reason, request.turn = "", request.turn + 1
        self._enqueue(request)

    def finish(self, request: Request, reason: str, *, keep: int = 0) -> None:
        """End a request wherever it is; its row is another's now.

        With `keep` it is held, with its pages and so many of its tokens.
        """
        if request.phase is Phase.STEPPING:
            request.cached = len(request.tokens) - 1  # the last one was chosen, and never read
        if request in self._queue:
            self._queue.remove(request)
        if request in self._held:
            self._held.remove(request)
        self._leave_row(request)
        request.reason = reason
        request.phase = Phase.HELD if keep else Phase.ENDED
        if keep:
            del request.tokens[keep:]
            # The last one is read again, with what is appended: its next is chosen then.
            request.cached = min(request.cached, keep - 1)
            self._held.append(request)
        else:
            self._drop(request)

    def forget(self, pools: Sequence[Pool]) -> None:
        """The pages were lost: whoever is not done is read again, into these."""
        self.pools, running = pools, self.running
        for request in (*running, *self._queue, *self._held):
            self._leave_row(request)
            self.read_again += request.cached
            request.pages = []  # of pools that are gone: nobody takes them back
            self._drop(request)
            request.ahead = request.unread = request.scored = 0
            request.log_p, request.likeliest = [], []
        for request in running:
            self._enqueue(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queue and not any(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that have no row and want one."""
        return len(self._queue)

    @property
    def running(self) -> list[Request]:
        """Requests that have a row, the first one first."""
        return sorted((request for request in self._rows if request), key=_order)

    # What is done next.

    def plan(self) -> Plan:
        """The next call of each kind; pages and counts are taken as if it were done."""
        self.last = plan = Plan()
        self._admit(plan)
        reading = any(request.phase is Phase.FILLING for request in self.running)
        self._read = (self._read + 1) % (self._reads + 1) if reading else 0
        self._plan_calls(plan)
        if not plan and self._read:  # what was to be read gave way
            self._read = 0
            self._plan_calls(plan)
        stepping = plan.stepping.values()
        # Tokens that are forced are counted in advance: all of their steps are taken.
        if self._queue and stepping and not any(request.forced for request in stepping):
            plan.hurry = True
            soonest = min(map(_left, stepping))
            plan.steps = min(plan.steps, max(soonest, SHORTEST))
        for request in stepping:
            request.ahead += plan.steps
        return plan

    def took(self, request: Request, turn: int, started: int, tokens: Sequence[int]) -> None:
        """Read what `started` steps of a turn chose, or, if 0, what follows the prompt."""
        if started:
            request.ahead -= started
        else:
            request.unread -= 1
        if request.done or request.turn != turn:
            return
        for token in tokens:
            request.tokens.append(token)
            if token in request.stops and len(request.tokens) > request.stops_from:
                return self._ended(request, "stop")
            if len(request.tokens) >= request.end:
                return self._ended(request, "length")
        if request.pages or request.copied:  # not one that will be read again
            request.cached = len(request.tokens) - 1
        return None

    def answered(self, request: Request, turn: int) -> None:
        """A piece of a turn was scored, or the log p of a prompt's next token was read."""
        request.unread -= 1
        if request.done or request.unread or request.turn != turn:
            return
        if request.scored == len(self._pieces(request)):
            self.finish(request, "scored", keep=request.keep and len(request.tokens))

    # Entering and leaving.

    def _enqueue(self, request):
        request.phase = Phase.QUEUED
        insort(self._queue, request, key=_order)

    def _ended(self, request, reason):
        share = (len(request.tokens) - request.prompt) / (request.end - request.prompt)
        self._expected += LEARNT * (share - self._expected)
        if request.phase is Phase.QUEUED and request.copied:
            request.cached = len(request.tokens) - 1
        self.finish(request, reason, keep=request.keep and len(request.tokens))

    def _admit(self, plan):
        """Give rows to those who come next; nobody overtakes one whose pages are not free yet."""
        while self._queue:
            request = self._queue[0]
            found = self._place(request, plan)
            if found is None:
                return
            row, shared = found
            self._queue.remove(request)
            self._enter(request, row, shared, plan)

    def _place(self, request, plan):
        """(a free row, pages that a prefix already fills) for a request, or None."""
        if request.ahead or request.unread:
            return None
        free = [row for row, there in enumerate(self._rows) if there is None]
        if request.pages:  # held: its pages are one shard's
            free = [row for row in free if self._shard(row) == request.shard]
        rows = {self._shard(row): row for row in reversed(free)}
        fits = []
        for shard, row in rows.items():
            pool, shared = self.pools[shard], self._known(request, shard)
            needed = max(_pages(self._expected_of(request)), request.copied)
            needed -= len(shared) + len(request.pages)
            others = [r for r in self._rows if r and r.shard == shard]
            needed += sum(max(0, _pages(self._expected_of(r)) - len(r.pages)) for r in others)
            room = pool.free - sum(pool.holders(page) == 0 for page in shared)
            while needed > room and (held := self._held_in(shard, request)):
                before = pool.free
                self._put_aside(held[0], plan)
                room += pool.free - before
            if needed <= room or not others:
                fits.append((len(shared), room, row, shared))
        return max(fits, key=lambda fit: fit[:2])[2:] if fits else None

    def _known(self, request, shard):
        """Pages of a prefix; at least one token of the prompt is left to read."""
        if request.pages or request.copied:
            return []
        whole = (len(request.tokens) - 1) // PAGE
        return self.pools[shard].shared(request.chain[:whole])

    def _enter(self, request, row, shared, plan):
        self._rows[row], request.row, request.shard = request, row, self._shard(row)
        pool = self.pools[request.shard]
        if request.copied:
            request.pages = pool.take(request.copied)
            plan.back.append(Move(request, request.shard, list(request.pages)))
            self._aside_left += request.copied
            request.copied = 0
        elif shared:
            pool.hold(shared)
            request.pages, request.cached = shared, len(shared) * PAGE
            request.from_prefix = request.cached
        if len(request.tokens) > request.prompt and request.cached == len(request.tokens) - 1:
            request.phase = Phase.STEPPING
            self._fresh.add(row)
        elif self._target(request) > request.cached:
            request.phase = Phase.FILLING
        else:
            request.phase = Phase.SCORING

    def _leave_row(self, request):
        if request.row is not None:
            self._fresh.discard(request.row)
            self._rows[request.row] = request.row = None

    def _drop(self, request):
        if request.pages:
            self.pools[request.shard].give_back(request.pages)
        self._aside_left += request.copied
        request.pages, request.copied, request.aside, request.cached = [], 0, None, 0

    # Pages.

    def _grow(self, request, tokens, plan):
        """Whether a request has pages for so many tokens now; younger ones may have given way."""
        pool, needed = self.pools[request.shard], _pages(tokens) - len(request.pages)
        while needed > pool.free:
            held = self._held_in(request.shard, request)
            rows = [r for r in self.running if r.shard == request.shard]
            victim = held[0] if held else rows[-1]
            self._put_aside(victim, plan)
            if victim is request:
                return False
        request.pages += pool.take(max(0, needed))
        return True

    def _put_aside(self, request, plan):
        """Take a request's pages, and its row if it has one; their content goes to the host."""
        if request.phase is Phase.STEPPING:
            request.cached = len(request.tokens) - 1
        pages = request.pages
        returning = [move for move in plan.back if move.request is request]
        if returning:  # it came in just now: the host still has its copies
            plan.back.remove(returning[0])
            pages = returning[0].pages
        # The pieces of a choice that is half scored are in no text to be read again.
        elif len(pages) <= self._aside_left or request.phase is Phase.SCORING:
            plan.aside.append(Move(request, request.shard, pages))
        else:
            pages = []
        self._aside_left -= len(pages)
        request.copied = len(pages)
        if not pages:
            self.read_again += request.cached
            request.cached = 0
        self.pools[request.shard].give_back(request.pages)
        request.pages = []
        if request.row is not None:
            self._leave_row(request)
            request.preempted += 1
            self.gave_way += 1
            self._enqueue(request)

    def _held_in(self, shard, request):
        """Requests without a row that keep pages in a shard, but for this one."""
        others = (r for r in (*self._held, *self._queue) if r is not request)
        return [r for r in others if r.pages and r.shard == shard]

    def _expected_of(self, request):
        """Tokens that a request will probably be; all that it may be, once it gave way often."""
        asked = max(request.end - len(request.tokens), 0)
        if request.preempted < PATIENCE:
            asked = round(self._expected * asked)
        return len(request.tokens) + max(asked, *map(len, request.choices), 1)

    def _shard(self, row):
        return row * len(self.pools) // len(self._rows)

    # Calls.

    def _plan_calls(self, plan):
        """In the order of coming: what an older one needs, a younger one has not used yet."""
        for request in self.running:
            if request.row is None:  # it gave way meanwhile
                continue
            if request.phase is Phase.FILLING:
                self._plan_fill(request, plan)
            elif request.phase is Phase.SCORING:
                self._plan_score(request, plan)
            elif request.phase is Phase.STEPPING and not self._read:
                self._plan_steps(request, plan)

    def _target(self, request):
        """Tokens to read before the request goes on; scoring reads the last one again."""
        return len(request.tokens) - bool(request.choices)

    def _plan_fill(self, request, plan):
        """Read on, in as many rows as are left: each sees what those before it write."""
        target = self._target(request)
        first = sum(shard == request.shard for shard, _ in plan.fills)
        stop = min(target, request.cached + (self._fill.rows - first) * self._fill.positions)
        if stop == request.cached or not self._grow(request, stop, plan):
            return
        begin, last = request.cached, stop == target and not request.choices
        for place, start in enumerate(range(begin, stop, self._fill.positions), first):
            tokens = request.tokens[start : min(start + self._fill.positions, stop)]
            ends = last and start + len(tokens) == stop
            plan.fills[request.shard, place] = Piece(request, start, tokens, last=ends)
        request.cached = stop
        for page in range(begin // PAGE, min(stop // PAGE, len(request.chain))):
            self.pools[request.shard].publish(request.pages[page], request.chain[page])
        if last:
            request.unread += 1
            request.phase = Phase.SCORING if request.nexts else Phase.STEPPING
        elif stop == target:
            request.phase = Phase.SCORING

    def _plan_score(self, request, plan):
        place = sum(shard == request.shard for shard, _ in plan.scores)
        pieces = self._pieces(request)
        if place == self._score.rows or request.scored == len(pieces):
            return
        choice, begin = pieces[request.scored]
        targets = choice[begin : begin + self._score.positions]
        tokens = [request.tokens[-1], *choice][begin : begin + len(targets)]
        start = len(request.tokens) - 1 + begin
        if not self._grow(request, start + len(tokens), plan):
            return
        plan.scores[request.shard, place] = Piece(request, start, tokens, targets)
        request.scored += 1
        request.unread += 1

    def _pieces(self, request):
        size = self._score.positions
        return [(c, begin) for c in request.choices for begin in range(0, len(c), size)]

    def _plan_steps(self, request, plan):
        left = _left(request)
        if left <= 0:
            return
        # The last token is chosen and never read. One call is not read yet.
        most = request.cached + request.ahead + self.steps + 2 * self._more
        most = min(most, request.end - 1)
        if not self._grow(request, most, plan):
            return
        plan.steps = max(plan.steps, min(left, self.steps))
        plan.stepping[request.row] = request
        if request.row in self._fresh:
            self._fresh.remove(request.row)
            plan.fresh.add(request.row)


def _order(request):
    return request.priority, request.number


def _left(request):
    """Tokens that are still to be chosen, of those that no call chooses yet."""
    return request.end - len(request.tokens) - request.unread - request.ahead


def _pages(tokens):
    return -(-tokens // PAGE)
