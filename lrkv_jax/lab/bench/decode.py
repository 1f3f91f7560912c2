"""The decode benchmark: scales × variants × shapes × implementations, in one run.

At each shape everything is made, checked against the truth, and then timed together, a sample of
each in every round. A time over MHA's is over the fastest MHA that was timed together with it.

B batch  D model width
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, gate, report
from lrkv_jax.lab.bench.decode_table import DecodeTiming
from lrkv_jax.lab.bench.implementations import IMPLEMENTATIONS, Implementation
from lrkv_jax.lab.bench.problems import (
    DecodeProblem,
    cache_nbytes,
    lengths_of,
    make_problem,
    nbytes_of,
    noise,
)
from lrkv_jax.lab.bench.variants import ScaleVariant, variants_of
from lrkv_jax.models.accounting.counts import parameter_counts
from lrkv_jax.models.layers import resolve_dtype
from lrkv_jax.models.transformer import abstract_model, abstract_parameters, with_parameters

LEVELS = ("attention", "step")
OURS = ("xla", "mosaic")  # what a model can run on
COPY_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}


@dataclass(frozen=True)
class DecodeBenchmark:
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
    overrides: tuple[str, ...] = ()  # of every variant's settings: model.heads=64

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
                f"implementations: {', '.join(self.implementations)} attend alone: a step runs on "
                f"{' or '.join(OURS)}"
            )
        for name in ("batches", "lengths"):
            for value in getattr(self, name):
                if value < 1:
                    raise LrkvError(f"{name}: {value} is not a size: use 1 or more")


Candidate = tuple[DecodeTiming, clock.Timer]  # a row and what times it


def run(settings: DecodeBenchmark, progress: report.Progress = report.silent) -> dict[str, Any]:
    """Measure, and return the report: machine, settings, copy bandwidth and rows."""
    settings = replace(settings, dtype=str(resolve_dtype(settings.dtype)))
    scales = {scale: _chosen_variants(scale, settings) for scale in settings.scales}
    shapes = [(s, b, n) for s in scales for b in settings.batches for n in settings.lengths]
    found = report.machine()
    copy_bytes = COPY_BYTES.get(jax.default_backend(), COPY_BYTES["cpu"])
    copies = clock.copy_bandwidth(copy_bytes)
    rows: list[DecodeTiming] = []
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
    }  # fmt: skip


def _chosen_variants(scale: str, settings: DecodeBenchmark) -> list[ScaleVariant]:
    """The variants of a scale that were chosen, computing in the cache's dtype."""
    lines = variants_of(
        scale, settings.variants, settings.ropes, depth=settings.depth, overrides=settings.overrides
    )
    return [line.computing_in(settings.dtype) for line in lines]


def _at_one_shape(settings, scale, chosen, batch, length) -> list[DecodeTiming]:
    """Every row of one scale, batch and length."""
    lengths_B = lengths_of(batch, length, ragged=settings.ragged, seed=settings.seed)
    rows_of = [
        [
            DecodeTiming(level, scale, line.variant, line.rope, name, batch, length,
                         settings.ragged, int(lengths_B.sum()), settings.dtype, kind=line.kind)
            for name in settings.implementations
            for level in settings.levels
            if level == "attention" or name in OURS
        ]
        for line in chosen
    ]  # fmt: skip
    limit = clock.memory_limit()
    needs = [_nbytes(line.config.model, batch, length, settings) for line in chosen]
    together = fitting(needs, limit)
    for index in set(range(len(chosen))) - set(together):
        reason = f"{needs[index] / 1e9:.1f} GB needed beside the variants before it, "
        reason += f"{limit / 1e9:.1f} GB to be had: time fewer variants at once"
        _put_down(rows_of[index], report.SKIPPED, reason)
    _measure(settings, [(chosen[i], rows_of[i]) for i in together], lengths_B, length)
    rows = [row for rows in rows_of for row in rows]
    report.compare_with_mha(rows, time_over_mha="us", bytes_over_mha="bytes_to_move")
    return rows


def fitting(needs: Sequence[int], limit: int) -> list[int]:
    """Indices of the variants that fit in memory together, of their bytes, taken in their order."""
    chosen: list[int] = []
    for index, need in enumerate(needs):
        if sum(needs[i] for i in chosen) + need <= limit:
            chosen.append(index)
    return chosen


def _measure(
    settings, rows_of: list[tuple[ScaleVariant, list[DecodeTiming]]], lengths_B, length
) -> None:
    """Fill in rows of several variants, all in memory at once."""
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
    rows: list[DecodeTiming],
    implementation: Implementation,
    problem: DecodeProblem,
    copies: list,
    turns,
    truth,
) -> list[Candidate]:
    """Compile, check and prepare one implementation at each of its levels.

    All implementations read the same `copies`, and take `turns` at them.
    """
    try:
        attend = partial(implementation.attend, problem)
        compiled = jax.jit(attend).lower(problem.inputs, copies[0], problem.lengths_B).compile()
        answer = compiled(problem.inputs, copies[0], jnp.asarray(truth.lengths_B))
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
            if row.level == "attention":
                made.append((row, _attention_timer(row, attend, compiled, problem, copies, turns)))
            else:
                made.append((row, _step_timer(row, problem, len(copies))))
        except Exception as error:
            _put_down([row], *report.reason_of(error))
    return made


def _attention_timer(
    row: DecodeTiming, attend, compiled, problem: DecodeProblem, copies, turns
) -> clock.Timer:
    row.bytes_to_move = problem.bytes_to_move
    row.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    calls, launches = clock.calls_and_launches(len(copies))
    sets: list[Any] = [copies[i : i + calls] for i in range(0, len(copies) - calls + 1, calls)]
    program = compiled
    if calls > 1:

        def many(inputs, caches, lengths_B):
            return [attend(inputs, cache, lengths_B) for cache in caches]

        program = jax.jit(many)
    else:
        sets = [caches[0] for caches in sets]
    arguments = [(problem.inputs, one, problem.lengths_B) for one in sets]
    return clock.timer(program, arguments, calls, launches, turns)


def _step_timer(row: DecodeTiming, problem: DecodeProblem, copies: int) -> clock.Timer:
    model = problem.model.model_copy(update={"decode_kernel": row.implementation})
    row.layers, row.bytes_to_move = model.layers, model.layers * problem.bytes_to_move
    compiled, program = model_program(model, np.asarray(problem.lengths_B), row.length, row.dtype)
    row.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    states = [_empty_state(model, row.batch, row.length, row.dtype)]
    return clock.state_timer(program, states, clock.calls_and_launches(copies)[1])


def model_program(model: ModelConfig, lengths_B, length: int, dtype: str) -> tuple[Any, Callable]:
    """(compiled, program) of a model: a token in, every layer, the head, the likeliest token out.

    `program((cache, token_B))` gives (token_B, (cache, token_B)).
    """
    batch = len(lengths_B)
    params = _random_like(abstract_parameters(model), dtype)
    unstacked = with_parameters(model, params).unstacked()

    def step(model, state, lengths_B):
        cache, token_B = state
        x_B1D, cache = model.decode(token_B[:, None], cache, lengths_B)
        token_B = jnp.argmax(model.logits(x_B1D)[:, 0], axis=-1).astype(jnp.int32)
        return token_B, (cache, token_B)

    state = jax.eval_shape(lambda: _empty_state(model, batch, length, dtype))
    before_B = jnp.asarray(lengths_B) - 1
    compiled = jax.jit(step, donate_argnums=1).lower(unstacked, state, before_B).compile()
    return compiled, lambda state: compiled(unstacked, state, before_B)


def _empty_state(model: ModelConfig, batch: int, length: int, dtype: str) -> tuple[Any, jax.Array]:
    """An empty cache of every layer, and a token of each sequence."""
    layer = abstract_model(model).blocks.attention
    caches = [layer.init_cache(batch, length, jnp.dtype(dtype)) for _ in range(model.layers)]
    return caches, jnp.zeros(batch, jnp.int32)


def _random_like(shapes, dtype):
    """Small random weights: their values cost no time."""
    leaves, tree = jax.tree.flatten(shapes)
    make = jax.jit(lambda: [noise(a.shape, dtype, i, 0.02) for i, a in enumerate(leaves)])
    return tree.unflatten(make())


def _time(candidates: list[Candidate], samples: int) -> None:
    """Fill in the rows' times, of samples taken in rounds."""
    taken = clock.interleaved([timer for _, timer in candidates], samples)
    for (row, _), times in zip(candidates, taken, strict=True):
        first, median, third = clock.quartiles(times)
        row.samples, row.us = len(times), 1e6 * median
        row.us_first_quartile, row.us_third_quartile = 1e6 * first, 1e6 * third
        if row.level == "attention":  # a step also reads weights
            row.bytes_per_second = row.bytes_to_move / median
        else:
            row.tokens_per_second = row.batch / median


def _put_down(rows: list[DecodeTiming], status: str, reason: str) -> list[Candidate]:
    for row in rows:
        row.status, row.reason = status, reason
    return []


@jax.jit
def _copy(cache):
    return jax.tree.map(jnp.copy, cache)


def _nbytes(model, batch, length, settings) -> int:
    """Bytes that one variant holds while it is timed."""
    cache = cache_nbytes(model, batch, length, settings.dtype)
    held = cache * clock.copies_needed(cache, clock.last_level_cache())
    if "step" in settings.levels:
        # Weights at their peak are stacked, and a layer at a time beside it.
        weights = 2 * parameter_counts(model).total * jnp.dtype(settings.dtype).itemsize
        held += model.layers * cache + weights
    return held
