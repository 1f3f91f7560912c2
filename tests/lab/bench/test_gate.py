"""A wrong implementation is named and never timed, however fast it may be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from support.problems import problem_of, truth_of

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, decode, gate
from lrkv_jax.lab.bench.decode_table import DecodeTiming
from lrkv_jax.lab.bench.implementations import IMPLEMENTATIONS, Implementation
from lrkv_jax.lab.bench.problems import with_kernel
from lrkv_jax.lab.bench.report import FAILED, MEASURED, SKIPPED, WRONG


def broken(how):
    """This project's kernel with one thing wrong."""

    def attend(problem, inputs, cache, lengths_B):
        if how == "no residual":
            cache = replace(cache, rk_BSGR=jnp.zeros_like(cache.rk_BSGR))
        if how == "no norm":
            cache = replace(cache, inverse_norm_BGS=jnp.ones_like(cache.inverse_norm_BGS))
        if how == "reads past the length":
            lengths_B = jnp.full_like(lengths_B, cache.k_shared_BSK.shape[1])
        out, lse = with_kernel(problem, inputs, cache, lengths_B, "xla")
        if how == "one head":
            out = out.at[:, :, 1].multiply(1.01)
        if how == "NaN":
            out = out.at[-1, 0, 0, 0].set(jnp.nan)
        return out, lse + (how == "log-sum-exp") * 1e-2

    return Implementation(how, attend, "broken on purpose")


def row_of(problem, name="x"):
    return DecodeTiming("attention", "tiny", "lrkv", "full", name, 2, 9, True, 14, "float32")


def judged(implementation, problem, truth=None):
    """(row, candidates) after the gate."""
    row, truth = row_of(problem), truth or truth_of("lrkv-full")
    turns = clock.rotation(1)
    return row, decode._candidates([row], implementation, problem, [problem.cache], turns, truth)


@pytest.mark.parametrize(
    "how",
    ["no residual", "no norm", "reads past the length", "one head", "NaN", "log-sum-exp"],
)
def test_a_broken_implementation_is_refused(how):
    row, candidates = judged(broken(how), problem_of("lrkv-full"))
    assert candidates == [] and row.status == WRONG and row.us is None
    assert row.error > 1e-3 and "truth" in row.reason and "not timed" in row.reason


def test_the_sound_one_passes_and_says_what_was_checked():
    row, candidates = judged(broken("nothing"), problem_of("lrkv-full"))
    assert len(candidates) == 1 and row.status == MEASURED
    assert row.error < 1e-5 and row.checked == "sequences of 5 and 9 tokens"
    assert row.temp_bytes >= 0


@pytest.mark.parametrize(
    ("raised", "status", "reason"),
    [
        (LrkvError("no GPU here"), SKIPPED, "no GPU here"),
        (RuntimeError("cuDNN is not detected.\nand more"), FAILED, "RuntimeError: cuDNN is not"),
        (AssertionError(), FAILED, "AssertionError"),
    ],
)
def test_what_a_peer_raises_is_its_reason_in_one_line(raised, status, reason):
    def attend(*arrays):
        raise raised

    row, candidates = judged(Implementation("peer", attend, "raises"), problem_of("lrkv-full"))
    assert candidates == [] and row.status == status
    assert row.reason.startswith(reason) and "\n" not in row.reason


def test_where_the_truth_would_not_fit_the_same_program_is_checked_on_fewer_tokens(monkeypatch):
    problem = problem_of("lrkv-full", lengths=(3, 40), slots=40)
    monkeypatch.setattr(gate, "TRUTH_VALUES", 16 * problem.model.heads * 8)
    truth = gate.truth_of(problem)
    assert truth.says == "sequences of 3 and 16 tokens"
    assert truth.lengths_B.tolist() == [3, 16]
    row, candidates = judged(broken("nothing"), problem, truth)
    assert len(candidates) == 1 and row.error < 1e-5
    assert judged(broken("no residual"), problem, truth)[0].status == WRONG


def test_rounding_to_bfloat16_is_allowed_in_bfloat16_alone():
    problem = problem_of("lrkv-full", lengths=(300, 700), slots=700, dtype="bfloat16")
    arrays = (problem.inputs, problem.cache, problem.lengths_B)
    out, lse = jax.jit(lambda *a: with_kernel(problem, *a, "xla"))(*arrays)
    rounded = out.astype(jnp.bfloat16).astype(jnp.float32)
    error = gate.error(gate.truth_of(problem), rounded, lse)
    assert gate.tolerance("float32") < error < gate.tolerance("bfloat16")


def test_samples_are_taken_in_rounds_of_random_order_and_slow_ones_stop_early():
    order = []

    def timer(name, seconds):
        return lambda: order.append(name) or seconds

    taken = clock.interleaved([timer("a", 0.1), timer("b", 1.0)], samples=40, seconds=20, least=3)
    rounds = {tuple(order[i : i + 2]) for i in range(0, 42, 2)}  # the first warms up
    assert rounds == {("a", "b"), ("b", "a")}
    assert [len(times) for times in taken] == [40, 20]
    assert clock.quartiles([4.0, 1.0, 2.0, 3.0, 100.0]) == (2.0, 3.0, 4.0)
    assert clock.quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_timers_that_share_a_rotation_read_each_buffer_after_all_the_others():
    read, turns = [], clock.rotation(4)
    buffers = [(n,) for n in range(4)]
    clock.interleaved([clock.timer(read.append, buffers, 1, 1, turns) for _ in range(2)], 8)
    assert len(read) >= 2 * 9 * 2  # timers, samples, calls
    assert read == [n % 4 for n in range(len(read))]


def test_a_sample_is_the_call_that_follows_others_of_its_program(monkeypatch):
    """Else it would pay for what the programs before it did to caches and to the allocator."""
    now, cost = [0.0], iter([0.008, 0.004, 0.003, 0.5, 0.4])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def program(state):
        now[0] += next(cost)
        return None, state

    assert clock.timer(program, [(0,)], 1, 1)() == pytest.approx(0.003)
    assert clock.state_timer(program, [0], 1)() == pytest.approx(0.4)


def test_rotating_buffers_add_up_to_more_than_the_cache():
    megabyte = 1 << 20
    assert clock.copies_needed(megabyte, 32 * megabyte) == 96
    assert clock.copies_needed(1000 * megabyte, 32 * megabyte) == 1
    assert clock.last_level_cache() >= megabyte


def test_a_program_of_several_calls_takes_each_buffer_in_turn(monkeypatch):
    """As on a GPU: calls in one program, each on its own copy, several programs a sample."""
    monkeypatch.setattr(clock, "calls_and_launches", lambda copies: (min(2, copies), 3))
    problem, truth, seen = problem_of("lrkv-full"), truth_of("lrkv-full"), []

    def attend(problem, inputs, cache, lengths_B):
        first = jax.tree.leaves(cache)[0].reshape(-1)[0]
        jax.debug.callback(lambda value: seen.append(float(value)), first)
        return with_kernel(problem, inputs, cache, lengths_B, "xla")

    marks = [jax.tree.map(lambda a, i=i: a.at[0].add(i), problem.cache) for i in range(5)]
    assert all(
        (a == b).all()
        for a, b in zip(*map(jax.tree.leaves, (marks[0], problem.cache)), strict=True)
    )
    each = Implementation("spy", attend, "notes its inputs")
    turns = clock.rotation(2)
    ((_, timer),) = decode._candidates([row_of(problem)], each, problem, marks, turns, truth)
    jax.effects_barrier()
    seen.clear()
    assert timer() > 0
    jax.effects_barrier()
    values = [float(jax.tree.leaves(mark)[0].reshape(-1)[0]) for mark in marks]
    # Four of the five copies, two a program; the third program begins again.
    assert sorted(seen) == sorted([*values[:4], *values[:2]])


def test_peers_object_where_they_cannot_help():
    grouped, factored = problem_of("mha"), problem_of("lrkv-full")
    said = {name: each.unsupported_reason(grouped) for name, each in IMPLEMENTATIONS.items()}
    assert said["xla"] is said["jax"] is None
    assert "not a GPU" in said["cudnn"]
    assert "whole keys" in IMPLEMENTATIONS["jax"].unsupported_reason(factored)
