"""The scheduler keeps its promises for any sequences, in any order, on a device that is played.

The played device stores tokens where a real one stores keys and values, and chooses a next token
from what it reads through the page table: a page that two sequences write, one that is handed on
too early, or a token that was never written changes a text.
"""

from collections import deque

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lrkv_jax.inference.pages import NULL, PAGE, Pool
from lrkv_jax.inference.request import Phase, Request, Sequence
from lrkv_jax.inference.schedule import SHORTEST, Scheduler, Shape

STEPS, LENGTH, STOP = 6, 4 * PAGE, 0
PREFILL, SCORE = Shape(2, PAGE), Shape(2, 8)


def following(tokens):
    """What a played model says after these tokens: anything, but always the same."""
    return hash(tuple(int(t) for t in tokens)) % 61


def text_of(tokens, end):
    """What one sequence says that has the device for itself."""
    output = list(tokens)
    while len(output) < end and (len(output) == len(tokens) or output[-1] != STOP):
        output.append(following(output))
    return output[len(tokens) :]


class Played:
    """A device: pages that hold tokens, slots that hold a length and a token.

    Layers with a window have pages that hold the same tokens, and are read that far back.
    """

    def __init__(self, pools, pages, window_pages, slots):
        self.pools = pools
        self.pages = np.full((len(pools), pages, PAGE), -1)
        self.windows = np.full((len(pools), window_pages, PAGE), -1)
        self.token, self.length, self.going = ([0] * slots for _ in range(3))
        self.answers = deque()  # of calls that were started
        self.published = [{} for _ in pools]  # before the present call

    def read(self, sequence, length):
        pages = self.pages[sequence.shard, sequence.pages]
        tokens = pages.reshape(-1)[:length].tolist()
        if windows := self.window_pages_of(sequence):
            first = max(0, length - self.pools[0]._window_pages.window)
            assert NULL not in windows[first // PAGE : -(-length // PAGE)]
            near = self.windows[sequence.shard, windows].reshape(-1)[first:length]
            assert near.tolist() == tokens[first:]
        return tokens

    def window_pages_of(self, sequence):
        return self.pools[sequence.shard].window_pages_of(sequence.pages, sequence.out_of_window)

    def write(self, sequence, start, tokens):
        windows = self.window_pages_of(sequence)
        for place, token in enumerate(tokens, start):
            page, shard = sequence.pages[place // PAGE], sequence.shard
            assert page != NULL
            public = self.pools[shard]._published.get(page)
            assert public is None or self.published[shard].get(page) != public, "others read it"
            self.pages[sequence.shard, page, place % PAGE] = token
            if windows:
                assert windows[place // PAGE] != NULL
                self.windows[sequence.shard, windows[place // PAGE], place % PAGE] = token

    def do(self, plan):
        arrays = self.pages, self.windows
        for sequence, shard, *of in plan.swap_out:
            sequence.swapped = [array[shard, at] for array, at in zip(arrays, of, strict=False)]
        for sequence, shard, *of in plan.swap_in:
            for array, at, content in zip(arrays, of, sequence.swapped, strict=False):
                array[shard, at] = content
            sequence.swapped = None
        answers = []
        written = {}  # who writes to a page in this call: nobody else does
        for chunk in (*plan.prefills.values(), *plan.scores.values()):
            sequence, stop = chunk.sequence, chunk.start + len(chunk.tokens)
            own = sequence.pages[chunk.start // PAGE : -(-stop // PAGE)]
            for page in own:
                assert written.setdefault((sequence.shard, page), sequence) is sequence
            self.write(sequence, chunk.start, chunk.tokens)
            if chunk.targets:
                ends = range(chunk.start + 1, stop + 1)
                right = [following(self.read(sequence, n)) for n in ends]
                answers.append(("score", sequence, right == list(chunk.targets)))
            elif chunk.last:
                token = following(self.read(sequence, stop))
                answers.append(("steps", sequence, sequence.turn, 0, [token]))
                if sequence.slot is not None:
                    self._set(sequence, sequence.slot, token, stop)
        for slot in plan.fresh:
            sequence = plan.decoding[slot]
            self._set(sequence, slot, sequence.tokens[-1], len(sequence.tokens) - 1)
        output = {slot: [] for slot in plan.decoding}
        began = list(self.going)
        for _ in range(plan.steps):
            if plan.stop_early and any(began[slot] and not self.going[slot] for slot in output):
                break
            for slot, sequence in plan.decoding.items():
                if self.going[slot]:
                    self.write(sequence, self.length[slot], [self.token[slot]])
                    self.length[slot] += 1
                    token = following(self.read(sequence, self.length[slot]))
                    self._set(sequence, slot, token, self.length[slot])
                    output[slot].append(token)
        for slot, sequence in plan.decoding.items():
            answers.append(("steps", sequence, sequence.turn, plan.steps, output[slot]))
        self.answers.append(answers)
        self.published = [dict(pool._published) for pool in self.pools]

    def _set(self, sequence, slot, token, length):
        self.token[slot], self.length[slot] = token, length
        self.going[slot] = (
            token not in sequence.request.stop_token_ids and length + 1 < sequence.max_length
        )


class World:
    """A scheduler and a device that answers one call late, and every invariant at every step."""

    def __init__(self, slots, shards, pages, host_pages, expected, window, watched):
        ahead = max(PREFILL.rows * PAGE, 2 * STEPS + 1)
        span = 0 if window is None else min(LENGTH, window + ahead) // PAGE + 2
        self.pools = [Pool(pages, window, span + 1, span) for _ in range(shards)]
        self.scheduler = Scheduler(
            self.pools, slots=slots, prefill=PREFILL, score=SCORE, steps=STEPS,
            host_pages=host_pages,
        )  # fmt: skip
        self.scheduler._expected = expected
        self.device = Played(self.pools, pages, span + 1, slots)
        self.all: list[Sequence] = []
        self.watched = watched

    def advance(self):
        reading = any(r.phase is Phase.PREFILLING for r in self.scheduler.running)
        plan = self.scheduler.plan(self.watched)
        assert not reading or plan.steps <= SHORTEST == 4, "as docs/serving.md says"
        assert self.watched or not (plan.prefills and plan.decoding), "all prompts come first"
        if plan:
            self.device.do(plan)
        while len(self.device.answers) > bool(plan):
            for kind, sequence, *rest in self.device.answers.popleft():
                if kind == "steps":
                    self.scheduler.record_tokens(sequence, *rest)
                else:
                    sequence.result.is_greedy += rest
                    self.scheduler.record_score(sequence)
        self.check()
        return bool(plan) or bool(self.device.answers)

    def check(self):
        for shard, pool in enumerate(self.pools):
            holders = [0] * len(pool._holders)
            for sequence in self.all:
                for page in sequence.pages:
                    if sequence.shard == shard:
                        holders[page] += 1
            assert holders == pool._holders, "each holder is a table's entry"
            held = sum(count > 0 for count in holders)
            assert pool.free == len(holders) - 1 - held
            if windows := pool._window_pages:
                own = [p for r in self.all if r.shard == shard for p in r.pages[r.out_of_window :]]
                assert windows._holders == [own.count(page) for page in range(len(holders))]
                there = [page for page in windows.page if page != NULL]
                assert len(set(there)) == len(there) and windows.free == pool.span - len(set(own))

    def finish(self):
        for _ in range(20_000):
            if not self.advance() and self.scheduler.idle:
                return
        raise AssertionError("sequences that never end")


PROMPT = st.tuples(st.sampled_from([0, 1, 2, 3]), st.integers(1, 2 * PAGE))
ASKED = st.fixed_dictionaries(
    {
        "prompt": PROMPT,
        "new": st.integers(1, 2 * PAGE),
        "kind": st.sampled_from(["text", "text", "keep", "score"]),
        "priority": st.integers(0, 1),
        "wait": st.integers(0, 3),
        "cancel": st.sampled_from([None, None, None, 0, 2, 5]),
    }
)


def prompt_of(family, length):
    """Prompts of one family begin alike."""
    return [1 + (family * 7 + place * place) % 19 for place in range(length)]


TEXT = {"prompt": (0, 46), "kind": "text", "priority": 0, "wait": 2, "cancel": None}
# One comes back, is preempted in the same call, and has tokens that were read in between.
RETURNING = [TEXT | {"new": 84}, TEXT | {"new": 84}, TEXT | {"new": 38, "wait": 0}]
# One goes on within a prompt whose first page the other has too.
SHARED = [TEXT | {"prompt": (0, PAGE + 6), "kind": "keep", "new": 40, "wait": 1, "cancel": 0}] * 2
# It goes on at the end of the page.
WHOLE = [TEXT | {"prompt": (0, PAGE + 19), "kind": "keep", "new": 40, "wait": 1, "cancel": 0}] * 2
MANY = [TEXT | {"prompt": (family, 2 * PAGE), "new": 9, "wait": 0} for family in range(12)]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.lists(ASKED, min_size=3, max_size=9),
    st.integers(1, 2).flatmap(lambda d: st.tuples(st.just(d), st.integers(2, 3))),
    st.sampled_from([5, 6, 15]),
    st.sampled_from([100, 3, 0]),
    st.sampled_from([0.0, 0.0, 0.7]),
    st.sampled_from([None, None, 5, 70]),
    st.booleans(),
)
@example(RETURNING, (2, 2), 5, 100, 0.0, 5, True)
@example(SHARED, (1, 2), 15, 100, 0.0, None, True)
@example(WHOLE, (1, 2), 15, 100, 0.0, None, True)
@example(MANY, (1, 12), 60, 100, 0.0, None, False)
def test_every_request_ends_with_its_own_text_and_gives_everything_back(
    asked, sizes, pages, host_pages, expected, window, watched
):
    shards, each = sizes
    world = World(shards * each, shards, pages, host_pages, expected, window, watched)
    cancels = []
    for what in asked:
        tokens = prompt_of(*what["prompt"])
        options = {"stop_token_ids": frozenset([STOP]), "priority": what["priority"]}
        new = 0 if what["kind"] == "score" else what["new"]
        if what["kind"] == "score":
            right = []
            while len(right) < 11:
                right.append(following(tokens + right))
            options["continuations"] = [right, [1], right[:5] + [62]]
        retain = what["kind"] == "keep"
        sequence = Sequence(Request(tokens, new, retain=retain, **options))
        world.scheduler.add(sequence)
        world.all.append(sequence)
        if what["cancel"] is not None:
            cancels.append((len(cancels) + what["cancel"], sequence))
        for _ in range(what["wait"]):
            world.advance()
    for calls, sequence in cancels:
        for _ in range(calls):
            world.advance()
        if not sequence.done:
            # Not all is kept: it goes on from before its last window, or within its prompt.
            kept = max(1, len(sequence.tokens) - 20)
            retain = sequence.request.retain and kept
            world.scheduler.finish(sequence, "cancelled", retain=retain)
            world.check()
    world.finish()
    for sequence, what in zip(world.all, asked, strict=True):
        assert sequence.done and not sequence.steps_in_flight and not sequence.reads_in_flight
        tokens = prompt_of(*what["prompt"])
        text = text_of(tokens, len(tokens) + what["new"])
        if what["kind"] in ("text", "keep"):
            assert sequence.tokens[: len(tokens)] == tokens[: len(sequence.tokens)]
            output = sequence.tokens[len(tokens) :]
            assert output == text[: len(output)]
            assert sequence.result.finish_reason == "cancelled" or output == text
        elif sequence.result.finish_reason != "cancelled":
            found = sequence.result.is_greedy
            assert found[:2] == [True, True] and found[-1] is False
        if sequence.phase is Phase.RETAINED and len(sequence.tokens) < LENGTH - 9:
            sequence.tokens += [5, 6]
            length = len(sequence.tokens)
            sequence.prompt_length = sequence.answer_start = length
            sequence.max_length = length + 3
            world.scheduler.add(sequence)
    before = [list(sequence.tokens) for sequence in world.all]
    world.finish()
    for sequence, tokens in zip(world.all, before, strict=True):
        if sequence.request.retain and sequence.turn == 2:
            assert sequence.tokens[len(tokens) :] == text_of(tokens, len(tokens) + 3)
    for sequence in world.all:
        if sequence.phase is Phase.RETAINED:
            world.scheduler.finish(sequence, "done")
    world.check()
    assert all(pool.free == pages - 1 for pool in world.pools)
    assert all(pool.free_window_pages == (pool.span or pages - 1) for pool in world.pools)
