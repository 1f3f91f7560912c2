"""The decode benchmark: scales × variants × shapes × implementations, in one run.

At each shape everything is made, checked against a reference, and then timed together, a sample of
each in every round. A time over MHA's is over the fastest MHA that was timed together with it.

B batch  S cache slots  H heads  G key/value heads  K head width
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.int8 import Int8Rows
from lrkv_jax.lab.bench import clock, report
from lrkv_jax.lab.bench.problems import (
    DecodeProblem,
    Reference,
    bytes_to_move,
    cache_nbytes,
    lengths_of,
    make_problem,
    reference_of,
    tolerance,
    with_kernel,
)
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.attention import abstract_layer
from lrkv_jax.models.attention.grouped import GroupedCache
from lrkv_jax.models.layers import resolve_dtype

COPY_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}


@dataclass(frozen=True)
class Implementation:
    """A way to attend to a cache: `attend(problem, inputs, cache, lengths_B)`.

    It gives (outputs, log-sum-exp or None). `unsupported_reason(problem)` is why it cannot solve a
    problem, or None.
    """

    attend: Callable[..., tuple[jax.Array, jax.Array | None]]
    unsupported_reason: Callable[[DecodeProblem], str | None] = lambda problem: None


def _needs_whole_keys(problem: DecodeProblem) -> str | None:
    cache = problem.cache
    materialized = isinstance(cache, GroupedCache) and not isinstance(cache.k_BSGK, Int8Rows)
    return None if materialized else "it needs whole keys and values of each head"


def _needs_cudnn(problem: DecodeProblem) -> str | None:
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not a GPU"
    if missing := _needs_whole_keys(problem):
        return missing
    dtype = problem.cache.k_BSGK.dtype
    return None if dtype == jnp.bfloat16 else f"cuDNN's attention takes no {dtype}"


def _jax_nn(implementation, problem, inputs, cache, lengths_B):
    """`jax.nn.dot_product_attention`, by XLA or by cuDNN."""
    out_BTHK = jax.nn.dot_product_attention(
        inputs.query, cache.k_BSGK, cache.v_BSGK,
        scale=abstract_layer(problem.model).scale, key_value_seq_lengths=lengths_B,
        implementation=implementation,
    )  # fmt: skip
    return out_BTHK, None


OURS = ("xla", "mosaic")  # what a model can run on
IMPLEMENTATIONS = {
    **{name: Implementation(partial(with_kernel, impl=name)) for name in OURS},
    "jax": Implementation(partial(_jax_nn, "xla"), _needs_whole_keys),
    "cudnn": Implementation(partial(_jax_nn, "cudnn"), _needs_cudnn),
}


@dataclass(frozen=True)
class DecodeBenchmark:
    """Settings of the benchmark. Raises `LrkvError` for what does not exist."""

    scales: tuple[str, ...] = ("128m",)
    variants: tuple[str, ...] | None = None  # None: all of the scale
    batches: tuple[int, ...] = (1, 4)
    lengths: tuple[int, ...] = (512, 2048, 8192)
    implementations: tuple[str, ...] = tuple(IMPLEMENTATIONS)
    ragged: bool = False
    dtype: str = "auto"
    samples: int = 31
    seed: int = 0
    overrides: tuple[str, ...] = ()  # of every variant's settings: model.heads=64

    def __post_init__(self):
        for name in self.implementations:
            if name not in IMPLEMENTATIONS:
                known = ", ".join(IMPLEMENTATIONS)
                raise LrkvError(f"implementations: {name} is unknown: use {known}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise LrkvError(f"dtype {self.dtype} is unknown: use auto, float32, bfloat16")
        if any(one.startswith("model.dtype=") for one in self.overrides):
            raise LrkvError("model.dtype: use --dtype, which sets it for every variant")
        report.check_settings(self, "scales", "variants", "batches", "lengths", "implementations")
        for name in ("batches", "lengths"):
            for value in getattr(self, name):
                if value < 1:
                    raise LrkvError(f"{name}: {value} is not a size: use 1 or more")


@dataclass
class DecodeTiming:
    """A layer's attention by one implementation, of one variant at one shape."""

    scale: str
    variant: str
    implementation: str
    batch: int
    length: int  # slots per sequence; the longest one's tokens
    ragged: bool
    tokens: int  # in the cache, over all sequences
    dtype: str
    status: str = report.MEASURED
    reason: str | None = None  # why it was not measured
    error: float | None = None  # from the reference, relative
    samples: int = 0
    us: float | None = None  # median microseconds
    us_first_quartile: float | None = None
    us_third_quartile: float | None = None
    bytes_to_move: int | None = None  # of the cache
    bytes_per_second: float | None = None
    share_of_copy: float | None = None
    time_over_mha: float | None = None  # the fastest MHA at its shape
    bytes_over_mha: float | None = None

    @property
    def name(self) -> str:
        """mha by xla."""
        return f"{self.variant} by {self.implementation}"

    @property
    def shape(self) -> tuple:
        """The key that rows must share to be compared."""
        return self.scale, self.batch, self.length, self.ragged


Candidate = tuple[DecodeTiming, clock.Timer]  # a row and what times it


def run(settings: DecodeBenchmark, progress: report.Progress = report.silent) -> dict[str, Any]:
    """Measure, and return the report: machine, settings, copy bandwidth and rows."""
    settings = replace(settings, dtype=str(resolve_dtype(settings.dtype)))
    overrides = (*settings.overrides, f"model.dtype={settings.dtype}")
    models = {
        scale: {
            name: config.model
            for name, config in report.variants_of(
                scale, settings.variants, overrides=overrides
            ).items()
        }
        for scale in settings.scales
    }
    for model in (one for of_scale in models.values() for one in of_scale.values()):
        if model.main_kind.window is not None:
            raise LrkvError(
                f"model.window = {model.window}: a layer reads so many tokens at every length, use "
                f"--length {model.window} without it"
            )
    copy_bytes = COPY_BYTES.get(jax.default_backend(), COPY_BYTES["cpu"])
    copies = clock.copy_bandwidth(copy_bytes)
    rows: list[DecodeTiming] = []
    done = itertools.count()
    total = sum(map(len, models.values())) * len(settings.batches) * len(settings.lengths)

    def begin(what: str) -> None:
        progress(what, next(done), total)

    for scale, batch, length in itertools.product(models, settings.batches, settings.lengths):
        rows += _at_one_shape(settings, scale, models[scale], batch, length, begin)
    # The machine may have been busier at one end of the run than at the other.
    copies += clock.copy_bandwidth(copy_bytes)
    first, bandwidth, third = clock.quartiles(copies)
    for row in rows:
        if row.bytes_per_second is not None:
            row.share_of_copy = row.bytes_per_second / bandwidth
    return {
        "benchmark": "decode",
        **report.machine(),
        "settings": asdict(settings),
        "copy_bytes_per_second": {
            "median": bandwidth, "first_quartile": first, "third_quartile": third,
            "array_bytes": copy_bytes,
        },
        "rows": rows,
    }  # fmt: skip


def _at_one_shape(
    settings, scale: str, models: dict[str, ModelConfig], batch: int, length: int, begin
) -> list[DecodeTiming]:
    """Every row of one scale, batch and length."""
    lengths_B = lengths_of(batch, length, ragged=settings.ragged, seed=settings.seed)
    shape = (batch, length, settings.ragged, int(lengths_B.sum()), settings.dtype)
    rows = {
        variant: [DecodeTiming(scale, variant, name, *shape) for name in settings.implementations]
        for variant in models
    }
    every = [row for of_variant in rows.values() for row in of_variant]
    caches = [cache_nbytes(model, batch, length, settings.dtype) for model in models.values()]
    limit = clock.memory_limit()
    copies = [clock.copies_needed(nbytes, limit // len(caches)) for nbytes in caches]
    need = sum(nbytes * count for nbytes, count in zip(caches, copies, strict=True))
    if report.skip_unless_it_fits(every, need, limit):
        candidates: list[Candidate] = []
        for (variant, model), count in zip(models.items(), copies, strict=True):
            begin(f"{scale}, batch {batch}, {length} tokens: {variant}")
            problem = make_problem(model, lengths_B, length, settings.dtype, settings.seed)
            candidates += _candidates(rows[variant], problem, count)
        _time(candidates, settings.samples)
    report.compare_with_mha(every, time_over_mha="us", bytes_over_mha="bytes_to_move")
    return every


def _candidates(rows: list[DecodeTiming], problem: DecodeProblem, count: int) -> list[Candidate]:
    """The timed calls of one variant: all implementations read the same copies of its cache."""
    copies = [problem.cache, *(_copy(problem.cache) for _ in range(count - 1))]
    reference = reference_of(problem)
    made = []
    for row in rows:
        implementation = IMPLEMENTATIONS[row.implementation]
        if reason := implementation.unsupported_reason(problem):
            row.status, row.reason = report.SKIPPED, reason
            continue
        try:
            attend = partial(implementation.attend, problem)
            if timer := _checked_timer(row, attend, problem, copies, reference):
                made.append((row, timer))
        except Exception as error:  # a peer may raise anything, and the rest must go on
            report.put_down(row, error)
    return made


def _checked_timer(
    row: DecodeTiming, attend, problem: DecodeProblem, copies: list, reference: Reference
) -> clock.Timer | None:
    """Compile a function, check it at its full shape, and time it; None if it is wrong."""
    inputs, lengths_B = problem.inputs, problem.lengths_B
    calls, launches = clock.calls_and_launches(len(copies))
    one = jax.jit(attend)  # traced and lowered once for all calls

    @jax.jit
    def several(inputs, caches, lengths_B):
        return [one(inputs, cache, lengths_B) for cache in caches]

    sets = [copies[i : i + calls] for i in range(0, len(copies) - calls + 1, calls)]
    compiled = several.lower(inputs, sets[0], lengths_B).compile()
    row.error = reference.error(*compiled(inputs, sets[0], lengths_B)[0])
    allowed = tolerance(row.dtype)
    if row.error > allowed:
        row.status = report.WRONG
        row.reason = (
            f"differs from the reference by {row.error:.1e}, {allowed:.0e} allowed: not timed"
        )
        return None
    row.bytes_to_move = bytes_to_move(problem.cache, np.asarray(lengths_B))
    return clock.timer(compiled, [(inputs, some, lengths_B) for some in sets], calls, launches)


def _time(candidates: list[Candidate], samples: int) -> None:
    """Fill in the rows' times, of samples taken in rounds."""
    taken = clock.interleaved([timer for _, timer in candidates], samples)
    for (row, _), times in zip(candidates, taken, strict=True):
        first, median, third = clock.quartiles(times)
        row.samples, row.us = len(times), 1e6 * median
        row.us_first_quartile, row.us_third_quartile = 1e6 * first, 1e6 * third
        row.bytes_per_second = row.bytes_to_move / median


@jax.jit
def _copy(cache):
    return jax.tree.map(jnp.copy, cache)


COLUMNS = ("variant", "by", "µs", "MB", "of\ncopy", "time\n× MHA", "bytes\n× MHA")
LEGEND = (
    "Medians of a layer's attention, ± half the distance between the quartiles; the dispatch\n"
    "of a call is in them. MB: cache bytes up to each length. Of copy: those bytes a second over\n"
    "a jitted copy's. × MHA: over the fastest MHA of the same shape, timed together with it."
)


def tables(found: dict[str, Any]) -> str:
    """A table for each shape of what was measured, and every reason why something was not."""
    rows, copy = found["rows"], found["copy_bytes_per_second"]["median"]
    parts = [f"{report.where(found)}; copies at {copy / 1e9:.1f} GB/s"]
    measured = [row for row in rows if row.status == report.MEASURED]
    for (scale, batch, length, ragged), same in groupby(measured, key=lambda row: row.shape):
        lengths = f"ragged, up to {length:,}" if ragged else f"{length:,}"
        title = f"{scale}, batch {batch}, {lengths} tokens"
        parts += [title, tabulated(COLUMNS, list(map(_cells, same)), form="simple", left=2)]
    return "\n\n".join([*parts, *report.reasons(rows), LEGEND])


def _cells(row: DecodeTiming) -> list[str]:
    return [
        row.variant,
        row.implementation,
        report.median(row.us, row.us_first_quartile, row.us_third_quartile),
        report.number(row.bytes_to_move / 1e6),
        f"{row.share_of_copy:.0%}",
        report.ratio(row.time_over_mha),
        report.ratio(row.bytes_over_mha),
    ]
