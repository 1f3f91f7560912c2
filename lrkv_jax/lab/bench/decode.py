"""The decode benchmark: scales × variants × shapes × implementations, in one run.

At each shape everything is made, checked against the truth, and then timed together, a sample of
each in every round. Where memory does not hold everything, lines are taken in groups that fit, and
MHA in its fastest implementation is timed with each. A time over MHA's is over the fastest MHA that
was timed together with it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, gate, report, whole
from lrkv_jax.lab.bench.decode_table import Row, exact_shares
from lrkv_jax.lab.bench.implementations import IMPLEMENTATIONS, Implementation
from lrkv_jax.lab.bench.lines import Line, lines_of
from lrkv_jax.lab.bench.problems import (
    Problem,
    cache_nbytes,
    lengths_of,
    make_problem,
    nbytes_of,
    rebuilt,
)
from lrkv_jax.models.layers import resolve_dtype

LEVELS = ("attention", "layer", "step")
OURS = ("xla", "mosaic")  # what a whole layer or model can run on
COPY_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}


@dataclass(frozen=True)
class Settings:
    """What to measure. Raises `LrkvError` for what does not exist."""

    scales: tuple[str, ...] = ("128m",)
    variants: tuple[str, ...] | None = None  # None: all of the scale
    ropes: tuple[str, ...] | None = None  # None: all that a variant has
    batches: tuple[int, ...] = (1, 4)
    lengths: tuple[int, ...] = (512, 2048, 8192)
    implementations: tuple[str, ...] = tuple(IMPLEMENTATIONS)
    levels: tuple[str, ...] = ("attention",)
    ragged: bool = False
    dtype: str = "auto"
    samples: int = 31
    depth: int | None = None  # layers of a step; None is the scale's
    seed: int = 0
    overrides: tuple[str, ...] = ()  # of every line's settings: model.heads=64

    def __post_init__(self):
        known = {"implementations": tuple(IMPLEMENTATIONS), "levels": LEVELS}
        for name, choices in known.items():
            for value in getattr(self, name):
                if value not in choices:
                    raise LrkvError(f"{name}: {value} is unknown: use {', '.join(choices)}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise LrkvError(f"dtype {self.dtype} is unknown: use auto, float32, bfloat16")
        report.check(self, "scales", "variants", "ropes", "batches", "lengths", *known)
        if "attention" not in self.levels and not set(OURS) & set(self.implementations):
            raise LrkvError(
                f"implementations: {', '.join(self.implementations)} attend alone: a layer or a "
                f"step runs on {' or '.join(OURS)}"
            )
        for name in ("batches", "lengths"):
            for value in getattr(self, name):
                if value < 1:
                    raise LrkvError(f"{name}: {value} is not a size: use 1 or more")


Candidate = tuple[Row, clock.Timer]  # a row and what times it


def run(settings: Settings, progress: report.Progress = report.silent) -> dict[str, Any]:
    """Measure, and return the report: machine, settings, copy bandwidth, rows, exact shares."""
    settings = replace(settings, dtype=str(resolve_dtype(settings.dtype)))
    scales = {scale: _subjects(scale, settings) for scale in settings.scales}
    shapes = [(s, b, n) for s in scales for b in settings.batches for n in settings.lengths]
    found = report.machine()
    copy_bytes = COPY_BYTES.get(jax.default_backend(), COPY_BYTES["cpu"])
    copies = clock.copy_bandwidth(copy_bytes)
    rows: list[Row] = []
    for done, (scale, batch, length) in enumerate(shapes):
        progress(f"{scale}, batch {batch}, {length} tokens", done, len(shapes))
        rows += _at_one_shape(settings, scale, scales[scale], batch, length)
    # The machine may have been busier at one end of the run than at the other.
    copies += clock.copy_bandwidth(copy_bytes)
    first, bandwidth, third = clock.quartiles(copies)
    for row in rows:
        if row.bytes_per_second is not None:
            row.share_of_copy = row.bytes_per_second / bandwidth
    progress("done", len(shapes), len(shapes))
    return {
        "benchmark": "decode",
        **found,
        "settings": asdict(settings),
        "copy_bytes_per_second": {
            "median": bandwidth, "first_quartile": first, "third_quartile": third,
            "array_bytes": copy_bytes,
        },
        "dispatch_us": 1e6 * clock.dispatch_seconds(),
        "last_level_cache_bytes": clock.last_level_cache(),
        "implementations": {
            name: IMPLEMENTATIONS[name].says for name in settings.implementations
        },
        "rows": rows,
        "exact_rope": exact_shares(rows),
    }  # fmt: skip


def _subjects(scale: str, settings: Settings) -> list[Line]:
    """The lines of a scale that were asked for, computing in the cache's dtype."""
    lines = lines_of(
        scale, settings.variants, settings.ropes, depth=settings.depth, overrides=settings.overrides
    )
    return [line.computing_in(settings.dtype) for line in lines]


def _at_one_shape(settings, scale, subjects, batch, length) -> list[Row]:
    """Every row of one scale, batch and length."""
    lengths_B = lengths_of(batch, length, ragged=settings.ragged, seed=settings.seed)

    def rows_of(line, implementation, levels=settings.levels, **more):
        return [
            Row(level, scale, line.variant, line.rope, implementation, batch, length,
                settings.ragged, int(lengths_B.sum()), settings.dtype, kind=line.kind, **more)
            for level in levels
            if level == "attention" or implementation in OURS
        ]  # fmt: skip

    limit = clock.memory_limit()
    needs = [_nbytes(line.config.model, batch, length, settings) for line in subjects]
    mha = next((i for i, line in enumerate(subjects) if line.variant == "mha"), None)
    made: dict[int, list[Row]] = {}
    anchors: list[Row] = []  # the fastest of MHA at each level
    for number, group in enumerate(grouped(needs, mha, limit)):
        chosen = {}
        for index in group:
            line = subjects[index]
            if index in made:  # MHA, timed again
                wanted = [(row.implementation, [row.level]) for row in anchors]
            else:
                wanted = [(name, settings.levels) for name in settings.implementations]
            chosen[index] = [
                row for name, levels in wanted for row in rows_of(line, name, levels, group=number)
            ]
        _measure(settings, [(subjects[i], chosen[i]) for i in group], lengths_B, length)
        together = [row for rows in chosen.values() for row in rows]
        report.compare_with_mha(together, time_over_mha="us", bytes_over_mha="bytes_to_move")
        made = chosen | made  # of MHA, the first time
        if mha in made and not anchors:
            anchors = [row for row in made[mha] if row.time_over_mha == 1]
    for index, line in enumerate(subjects):
        if index not in made:
            need = sum(needs[index])
            reason = f"{need / 1e9:.1f} GB needed, {limit / 1e9:.1f} GB to be had"
            more = {"status": report.SKIPPED, "reason": reason}
            rows = [rows_of(line, name, **more) for name in settings.implementations]
            made[index] = [row for each in rows for row in each]
    return [row for index in range(len(subjects)) for row in made[index]]


def grouped(needs: Sequence[tuple[int, int]], mha: int | None, limit: int) -> list[list[int]]:
    """Indices of lines that fit in memory together, in as few groups as their order gives.

    `needs` are (bytes held, bytes needed for a moment) of each line: what is needed for a moment is
    not needed by two at once. The line `mha` is the first of every group, unless a line fits
    without it alone. Lines that fit in no group are in none.
    """

    def fits(group):
        return sum(needs[i][0] for i in group) + max(needs[i][1] for i in group) <= limit

    first = [mha] if mha is not None and fits([mha]) else []
    groups, alone = [list(first)], []
    for index in range(len(needs)):
        if index == mha:
            continue
        room = next((group for group in groups if fits([*group, index])), None)
        if room is not None:
            room.append(index)
        elif fits([*first, index]):
            groups.append([*first, index])
        elif fits([index]):
            alone.append([index])
    return [group for group in groups if group] + alone


def _measure(settings, rows_of: list[tuple[Line, list[Row]]], lengths_B, length) -> None:
    """Fill in rows of several lines, all in memory at once."""
    candidates = []
    for line, rows in rows_of:
        model = line.config.model
        problem = make_problem(model, lengths_B, length, settings.dtype, settings.seed)
        count = clock.copies_needed(nbytes_of(problem.cache), clock.last_level_cache())
        copies = [problem.cache, *(_copy(problem.cache) for _ in range(count - 1))]
        turns = clock.rotation(count // clock.calls_and_launches(count)[0])
        truth = None
        for name in dict.fromkeys(row.implementation for row in rows):
            made = [row for row in rows if row.implementation == name]
            implementation = IMPLEMENTATIONS[name]
            if reason := implementation.unsupported_reason(problem):
                _put_down(made, report.SKIPPED, reason)
                continue
            truth = truth or gate.truth_of(problem)
            candidates += _candidates(made, implementation, problem, copies, turns, truth)
    for level in settings.levels:
        _time([(row, timer) for row, timer in candidates if row.level == level], settings.samples)


def _candidates(
    rows: list[Row], implementation: Implementation, problem: Problem, copies: list, turns, truth
) -> list[Candidate]:
    """Compile, check and prepare one implementation at each of its levels.

    All implementations read the same `copies`, and take `turns` at them.
    """
    try:
        attend = partial(implementation.attend, problem)
        copies = [implementation.arrange(cache) for cache in copies]
        compiled = jax.jit(attend).lower(problem.given, copies[0], problem.lengths_B).compile()
        answer = compiled(problem.given, copies[0], jnp.asarray(truth.lengths_B))
        difference = gate.error(truth, *answer)
    except Exception as error:  # a peer may raise anything, and the rest must go on
        return _put_down(rows, *report.reason_of(error))
    allowed = gate.tolerance(rows[0].dtype)
    for row in rows:
        row.error, row.checked = difference, truth.says
    if difference > allowed:
        reason = f"differs from the truth by {difference:.1e}, {allowed:.0e} allowed: not timed"
        return _put_down(rows, report.WRONG, reason)
    made = []
    for row in rows:
        try:
            made.append(_candidate(row, attend, compiled, problem, copies, turns))
        except Exception as error:
            _put_down([row], *report.reason_of(error))
    return made


def _candidate(row: Row, attend, compiled, problem: Problem, copies: list, turns) -> Candidate:
    row.bytes_to_move = problem.bytes_to_move
    calls, launches = clock.calls_and_launches(len(copies))
    if row.level == "attention":
        row.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        sets = [copies[i : i + calls] for i in range(0, len(copies) - calls + 1, calls)]
        program = compiled
        if calls > 1:

            def many(given, caches, lengths_B):
                return [attend(given, cache, lengths_B) for cache in caches]

            program = jax.jit(many)
        else:
            sets = [caches[0] for caches in sets]
        arguments = [(problem.given, one, problem.lengths_B) for one in sets]
        return row, clock.timer(program, arguments, calls, launches, turns)
    model = problem.model.model_copy(update={"decode_kernel": row.implementation})
    shape = (model, np.asarray(problem.lengths_B), row.length, row.dtype)
    if row.level == "layer":
        compiled, program = whole.layer_program(*shape, problem.given.weights)
        # A step replaces its cache, and the other levels still need theirs.
        states = [_copy(cache) for cache in copies]
    else:
        row.layers, row.bytes_to_move = model.layers, model.layers * row.bytes_to_move
        compiled, program = whole.model_program(*shape)
        states = [whole.model_state(model, row.batch, row.length, row.dtype)]
    row.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    return row, clock.state_timer(program, states, launches)


def _time(candidates: list[Candidate], samples: int) -> None:
    """Fill in the rows' times, of samples taken in rounds."""
    taken = clock.interleaved([timer for _, timer in candidates], samples)
    for (row, _), times in zip(candidates, taken, strict=True):
        first, median, third = clock.quartiles(times)
        row.samples, row.us = len(times), 1e6 * median
        row.us_first_quartile, row.us_third_quartile = 1e6 * first, 1e6 * third
        if row.level == "attention":  # the others also read weights
            row.bytes_per_second = row.bytes_to_move / median
        if row.level == "step":
            row.tokens_per_second = row.batch / median


def _put_down(rows: list[Row], status: str, reason: str) -> list[Candidate]:
    for row in rows:
        row.status, row.reason = status, reason
    return []


@jax.jit
def _copy(cache):
    return jax.tree.map(jnp.copy, cache)


def _nbytes(model, batch, length, settings) -> tuple[int, int]:
    """Bytes that one variant holds while it is timed, and more that it needs for a moment."""
    cache = cache_nbytes(model, batch, length, settings.dtype)
    held, moment = cache * clock.copies_needed(cache, clock.last_level_cache()), 0
    if "layer" in settings.levels:
        held *= 2
    if "step" in settings.levels:
        held += model.layers * cache + whole.model_nbytes(model, settings.dtype)
    if "pallas" in settings.implementations and jax.default_backend() == "gpu":
        held *= 2  # it keeps its copies in its own layout
    if "naive" in settings.implementations:
        # Every head's keys and values, and the residual beside them.
        moment = 3 * rebuilt(model, batch, length, settings.dtype) // 2
    return held, moment
