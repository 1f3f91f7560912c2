"""The scheduler keeps its promises for any requests, in any order, on a device that is played.

The played device stores tokens where a real one stores keys and values, and chooses a next token
from what it reads through the page table: a page that two requests write, one that is handed on too
early, or a token that was never written changes a text.
"""

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.inference.pages import NULL, PAGE, Pool
from lrkv_jax.inference.request import Phase, Request
from lrkv_jax.inference.schedule import Scheduler, Shape

STEPS, LENGTH, STOP = 6, 4 * PAGE, 0
FILL, SCORE = Shape(2, PAGE), Shape(2, 8)


def following(tokens):
    """What a played model says after these tokens: anything, but always the same."""
    return hash(tuple(int(t) for t in tokens)) % 61


def text_of(tokens, end):
    """What one request says that has the device for itself."""
    said = list(tokens)
    while len(said) < end and (len(said) == len(tokens) or said[-1] != STOP):
        said.append(following(said))
    return said[len(tokens) :]


class Played:
    """A device: slots that hold tokens, rows that hold a length and a token.

    A row takes a token a step, and in a call now and then up to `more` beyond them.
    """

    def __init__(self, pages, shards, rows, more):
        self.more = more
        self.slots = np.full((shards, pages, PAGE), -1)
        self.token, self.length, self.going = ([0] * rows for _ in range(3))
        self.answers = deque()  # of calls that were started

    def read(self, request, length):
        pages = self.slots[request.shard, request.pages]
        return pages.reshape(-1)[:length].tolist()

    def write(self, request, start, tokens):
        for place, token in enumerate(tokens, start):
            page = request.pages[place // PAGE]
            assert page != NULL
            self.slots[request.shard, page, place % PAGE] = token

    def do(self, plan):
        for request, shard, pages in plan.aside:
            request.aside = self.slots[shard, pages].copy()
        for request, shard, pages in plan.back:
            self.slots[shard, pages] = request.aside
            request.aside = None
        answers = []
        written = {}  # who writes to a page in this call: nobody else does
        for piece in (*plan.fills.values(), *plan.scores.values()):
            request, stop = piece.request, piece.start + len(piece.tokens)
            own = request.pages[piece.start // PAGE : -(-stop // PAGE)]
            for page in own:
                assert written.setdefault((request.shard, page), request) is request
            self.write(request, piece.start, piece.tokens)
            if piece.targets:
                ends = range(piece.start + 1, stop + 1)
                right = [following(self.read(request, n)) for n in ends]
                answers.append(("score", request, request.turn, right == list(piece.targets)))
            elif piece.last:
                token = following(self.read(request, stop))
                if request.nexts:
                    answers.append(("next", request, request.turn, token))
                    continue
                answers.append(("steps", request, request.turn, 0, [token]))
                if request.row is not None:
                    self._set(request, request.row, token, stop)
        for row in plan.fresh:
            request = plan.stepping[row]
            self._set(request, row, request.tokens[-1], len(request.tokens) - 1)
        said = {row: [] for row in plan.stepping}
        began, left = list(self.going), [self.more] * len(self.going)
        for _ in range(plan.steps):
            if plan.hurry and any(began[row] and not self.going[row] for row in said):
                break
            for row, request in plan.stepping.items():
                another = self.going[row]
                while another:
                    self.write(request, self.length[row], [self.token[row]])
                    self.length[row] += 1
                    token = following(self.read(request, self.length[row]))
                    self._set(request, row, token, self.length[row])
                    said[row].append(token)
                    another = self.going[row] and left[row] > 0 and token % 3 > 0
                    left[row] -= another
        for row, request in plan.stepping.items():
            answers.append(("steps", request, request.turn, plan.steps, said[row]))
        self.answers.append(answers)

    def _set(self, request, row, token, length):
        self.token[row], self.length[row] = token, length
        self.going[row] = token not in request.stops and length + 1 < request.end


class World:
    """A scheduler and a device that answers one call late, and every invariant at every step."""

    def __init__(self, rows, shards, pages, aside, expected, more):
        self.pools = [Pool(pages) for _ in range(shards)]
        self.scheduler = Scheduler(
            self.pools, rows=rows, fill=FILL, score=SCORE, steps=STEPS,
            aside=aside, expected=expected, more=more,
        )  # fmt: skip
        self.device = Played(pages, shards, rows, more)
        self.all: list[Request] = []
        self.late = 1

    def advance(self):
        plan = self.scheduler.plan()
        if plan:
            self.device.do(plan)
        while len(self.device.answers) > (self.late if plan else 0):
            for kind, request, *rest in self.device.answers.popleft():
                if kind == "steps":
                    self.scheduler.took(request, *rest)
                else:
                    turn, answer = rest
                    if request.turn == turn:
                        request.likeliest.append(answer)
                    self.scheduler.answered(request, turn)
        self.check()
        return bool(plan) or bool(self.device.answers)

    def check(self):
        for shard, pool in enumerate(self.pools):
            holders = [0] * len(pool._holders)
            for request in self.all:
                for page in request.pages:
                    if request.shard == shard:
                        holders[page] += 1
            assert holders == pool._holders, "each holder is a table's entry"
            held = sum(count > 0 for count in holders)
            assert pool.free == len(holders) - 1 - held

    def finish(self):
        for _ in range(20_000):
            if not self.advance() and self.scheduler.idle:
                return
        raise AssertionError("requests that never end")


PROMPT = st.tuples(st.sampled_from([0, 1, 2, 3]), st.integers(1, 2 * PAGE))
ASKED = st.fixed_dictionaries(
    {
        "prompt": PROMPT,
        "new": st.integers(1, 2 * PAGE),
        "kind": st.sampled_from(["text", "text", "keep", "score", "next"]),
        "priority": st.integers(0, 1),
        "wait": st.integers(0, 3),
        "cancel": st.sampled_from([None, None, None, 0, 2, 5]),
    }
)


def prompt_of(family, length):
    """Prompts of one family begin alike."""
    return [1 + (family * 7 + place * place) % 19 for place in range(length)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(ASKED, min_size=3, max_size=9),
    st.integers(1, 2).flatmap(lambda d: st.tuples(st.just(d), st.integers(2, 3))),
    st.sampled_from([5, 6]),
    st.sampled_from([100, 3, 0]),
    st.sampled_from([0.0, 0.0, 0.7]),
    st.sampled_from([0, 13]),
)
def test_every_request_ends_with_its_own_text_and_gives_everything_back(
    asked, sizes, pages, aside, expected, more
):
    shards, each = sizes
    world = World(shards * each, shards, pages, aside, expected, more)
    cancels = []
    for what in asked:
        tokens = prompt_of(*what["prompt"])
        request = Request(
            tokens, len(tokens) + what["new"], stops=frozenset([STOP]),
            keep=what["kind"] == "keep", priority=what["priority"],
        )  # fmt: skip
        if what["kind"] in ("score", "next"):
            request.end = len(tokens)
        if what["kind"] == "score":
            right = []
            while len(right) < 11:
                right.append(following(tokens + right))
            request.choices = [right, [1], right[:5] + [62]]
        if what["kind"] == "next":
            request.nexts = [1]
        world.scheduler.add(request)
        world.all.append(request)
        if what["cancel"] is not None:
            cancels.append((len(cancels) + what["cancel"], request))
        for _ in range(what["wait"]):
            world.advance()
    for calls, request in cancels:
        for _ in range(calls):
            world.advance()
        if not request.done:
            world.scheduler.finish(request, "cancelled", keep=request.keep and len(request.tokens))
            world.check()
    world.finish()
    for request, what in zip(world.all, asked, strict=True):
        assert request.done and not request.ahead and not request.unread
        tokens = prompt_of(*what["prompt"])
        text = text_of(tokens, len(tokens) + what["new"])
        if what["kind"] in ("text", "keep"):
            assert request.tokens[: len(tokens)] == tokens
            said = request.tokens[len(tokens) :]
            assert said == text[: len(said)]
            assert request.reason == "cancelled" or said == text
        elif request.reason != "cancelled":
            good = [True, True, text[0] == 1 if len(text) else False, False]
            if what["kind"] == "score":
                assert request.likeliest[:2] == good[:2] and request.likeliest[-1] is False
            else:
                assert request.likeliest == [following(tokens)]
        if request.phase is Phase.HELD and len(request.tokens) < LENGTH - 9:
            request.tokens += [5, 6]
            request.prompt, request.end = len(request.tokens), len(request.tokens) + 3
            world.scheduler.add(request)
    before = [list(request.tokens) for request in world.all]
    world.finish()
    for request, tokens in zip(world.all, before, strict=True):
        if request.keep and request.turn == 2:
            assert request.tokens[len(tokens) :] == text_of(tokens, len(tokens) + 3)
    for request in world.all:
        if request.phase is Phase.HELD:
            world.scheduler.finish(request, "done")
    world.check()
    assert all(pool.free == pages - 1 for pool in world.pools)
