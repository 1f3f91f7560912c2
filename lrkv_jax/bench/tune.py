"""Which plan of the compiled decode kernel is the fastest at a shape, measured on this device.

A plan is varied along one axis at a time: how heads share a CTA, the depth of its rings, CTAs per
multiprocessor, and workers (the splits of the row of tiles). A candidate that differs from the
truth is not timed. It is sampled in turn with the computed plan, so that a ratio is of neighbouring
moments. In mode `full` the kernel has one way to residual keys, which it rebuilds; M_h(q) is XLA's.

Which plan holds where is `lrkv_jax.kernels.split_kv.tuned`'s.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lrkv_jax.bench import clock, gate
from lrkv_jax.bench.lines import lines_of
from lrkv_jax.bench.problems import Problem, lengths_of, make_problem, nbytes_of, with_kernel
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import proof
from lrkv_jax.kernels.split_kv import plan as plans
from lrkv_jax.kernels.split_kv import tuned

AXES = ("heads", "rings", "ctas", "workers")
Choice = dict[str, int]  # what a table says of a plan


@dataclass(frozen=True)
class Shape:
    """A line of a scale, and the cache that it attends to."""

    scale: str
    variant: str
    rope: str | None
    batch: int
    length: int
    dtype: str


def computed(shape: Shape) -> Any:
    """The plan that the kernel has without a table. Raises `LrkvError` where it cannot run."""
    seen: list[Any] = []

    def note(plan: Any) -> Any:
        seen.append(plan)
        return plan

    problem, _ = _problem(shape)
    with tuned.trying(note), proof.unneeded():
        jax.eval_shape(_attend(problem), problem.given, problem.cache, problem.lengths_B)
    return seen[0]


def candidates(shape: Shape, axis: str, start: Choice | None) -> list[Choice]:
    """Plans that differ from `start` (from the computed one, without it) along one axis."""
    first = computed(shape)
    plan = tuned.with_choice(first, start) if start else first
    found = [tuned.chosen(one) for one in _along(axis, plan) if plans.unfit(one) is None]
    known = tuned.chosen(plan)
    return [one for n, one in enumerate(found) if one != known and one not in found[:n]]


def _along(axis: str, plan: Any) -> Iterator[Any]:
    busy = plan.workers * plan.units / plan.ctas  # the multiprocessors that it was made for
    if axis == "heads":
        shape = {
            "H": plan.query_heads, "G": plan.groups, "T": plan.queries, "rank": plan.rank,
            "key_widths": plan.key_widths, "value_width": plan.value_width, "full": plan.full,
            "values_in_keys": plan.values_in_keys, "norm_heads": min(plan.norm_heads, 1),
            "shared_norm": plan.shared_norm,
        }  # fmt: skip
        yield from plans.splits(multiprocessors=max(1, round(busy)), **shape)
    elif axis == "rings":
        for ring in range(plan.key_blocks + 1, plans.MOST_SLOTS + 1, max(1, plan.key_blocks)):
            if made := plans.with_rings(plan, plan.ctas, ring):
                yield made
    elif axis == "ctas":
        for ctas in (1, 2):
            if made := plans.with_rings(plan, ctas):
                yield replace(made, workers=max(1, round(busy * ctas / plan.units)))
    elif axis == "workers":
        for times in (0.5, 2, 4):
            yield replace(plan, workers=max(1, round(times * plan.workers)))
    else:
        raise LrkvError(f"axis {axis}: use {', '.join(AXES)}")


def compare(shape: Shape, choice: Choice, samples: int) -> dict[str, Any]:
    """Microseconds of a plan and of the computed one, sampled in turn, and their ratio.

    Raises `LrkvError` where the plan's results differ from the truth.
    """
    problem, truth = _problem(shape)
    first = computed(shape)
    base = _timer(shape, tuple(tuned.chosen(first).items()))
    other = _timer(shape, tuple(choice.items()))
    taken = clock.interleaved([base, other], samples)
    computed_us, us = ([1e6 * t for t in clock.quartiles(times)] for times in taken)
    return {
        "family": tuned.family(first), "choice": choice, "us": us, "computed_us": computed_us,
        "ratio": us[1] / computed_us[1], "checked": truth.says,
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def _problem(shape: Shape) -> tuple[Problem, gate.Truth]:
    (line,) = lines_of(shape.scale, [shape.variant], shape.rope and [shape.rope])
    lengths_B = lengths_of(shape.batch, shape.length, ragged=False, seed=0)
    model = line.computing_in(shape.dtype).config.model
    problem = make_problem(model, lengths_B, shape.length, shape.dtype, seed=0)
    return problem, gate.truth_of(problem)


def _attend(problem: Problem) -> Any:
    """The layer's own decode through the compiled kernel, interpreted where nothing compiles."""
    impl = "interpret" if jax.default_backend() == "cpu" else "mosaic"
    return partial(with_kernel, problem, impl=impl)


@functools.lru_cache(maxsize=2)
def _timer(shape: Shape, choice: tuple[tuple[str, int], ...]) -> clock.Timer:
    """What times one plan, whose results were checked."""
    problem, truth = _problem(shape)
    attend, fields = _attend(problem), dict(choice)
    count = clock.copies_needed(nbytes_of(problem.cache), clock.last_level_cache())
    caches = [problem.cache]
    if jax.default_backend() != "cpu":
        caches += [jax.tree.map(jnp.copy, problem.cache) for _ in range(count - 1)]
    calls, launches = clock.calls_and_launches(len(caches))

    def many(given, some, lengths_B):
        return [attend(given, cache, lengths_B) for cache in some]

    program = jax.jit(many)
    with tuned.trying(lambda plan: tuned.with_choice(plan, fields)), proof.unneeded():
        (answer,) = program(problem.given, [problem.cache], jnp.asarray(truth.lengths_B))
        error = gate.error(truth, *answer)
        allowed = gate.tolerance(shape.dtype)
        if error > allowed:
            raise LrkvError(f"it differs from the truth by {error:.1e}, {allowed:.0e} allowed")
        sets = [caches[i : i + calls] for i in range(0, len(caches) - calls + 1, calls)]
        arguments = [(problem.given, some, problem.lengths_B) for some in sets]
        timer = clock.timer(program, arguments, calls, launches)
        timer()  # traced here, where its plan is chosen
    return timer
