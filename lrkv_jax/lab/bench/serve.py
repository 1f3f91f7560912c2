"""What serving gains, as ratios within one run: `lrkv bench serve`.

Both arms of a ratio are measured in turns on the same machine, on random weights: times depend on
shapes, and requests end where the trace says.

B texts decoded together
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Engine
from lrkv_jax.inference.pages import PAGE
from lrkv_jax.inference.placement import model_of
from lrkv_jax.lab.bench import load as loads
from lrkv_jax.lab.bench.load import Load
from lrkv_jax.lab.bench.report import Progress, machine, silent, table, where
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.models.transformer import init_parameters

# Steps of a call.
STEPS = 8
# Of the requests that an engine can answer, those that come.
BUSY = 0.8


@dataclass(frozen=True)
class Settings:
    """What is measured, on which scale; the first variant is what the second is held against."""

    scale: str = "nano_family"
    variants: tuple[str, str] = ("mha", "lrkv_latent")
    batches: tuple[int, ...] = (8, 16)
    context: int = 1024
    requests: int = 64
    samples: int = 3
    overrides: tuple[str, ...] = ()  # of the scale
    http: bool = True
    dtype: str = "float32"


@dataclass
class Ratio:
    """A ratio: its median and extremes over the samples."""

    what: str
    variant: str
    ratio: float
    least: float
    most: float


def run(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """Measure every ratio. Raises `LrkvError` for a scale or a variant that there is not."""
    if settings.samples < 1 or settings.requests < max(settings.batches):
        raise LrkvError("samples: use 1 or more; requests: as many as rows, or more")
    made = {variant: _made(settings, variant) for variant in settings.variants}
    engines: dict[tuple[str, int], Engine] = {}

    def engine(variant: str, B: int) -> Engine:
        key = variant, B
        if key not in engines:
            engines[key] = _engine(*made[variant], settings, batch=B)
        engines[key].reset()
        return engines[key]

    few = min(settings.batches)
    parts: list[tuple[str, Callable[[], list[Ratio]]]] = []
    for variant, (config, _) in made.items():
        of = partial(engine, variant)
        for B in settings.batches:
            parts.append((f"{variant}, {B} rows", partial(_continuous, settings, variant, of, B)))
        if config.model.attention.int8_rows(config.model):
            parts.append(
                (f"{variant}, int8", partial(_int8, settings, variant, made[variant], few))
            )
        parts.append((f"{variant}, prefix", partial(_prefix, settings, variant, of, few)))
        if settings.http:
            parts.append((f"{variant}, HTTP", partial(_http, settings, variant, of, few, config)))
    parts.append(("equal bytes", partial(_equal_bytes, settings, made)))
    rows: list[Ratio] = []
    for number, (text, measure) in enumerate(parts):
        progress(text, number, len(parts))
        rows += measure()
    progress("done", len(parts), len(parts))
    return {
        "benchmark": "serve", **machine(), "settings": dataclasses.asdict(settings), "rows": rows,
    }  # fmt: skip


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print each ratio with its range."""
    shown = table("ratio", "variant", "measured", "range", left=2)
    for row in report["rows"]:
        between = f"{row.least:.2f} to {row.most:.2f}"
        shown.add_row(row.what, row.variant, f"{row.ratio:.2f}", between)
    console.print(where(report), highlight=False)
    console.print(shown)


def print_load(summary: dict[str, Any], console: Console) -> None:
    """What clients of a server waited."""
    shown = table("", "p50", "p99")
    names = {
        "ttft": "first token, ms",
        "tpot": "each further token, ms",
        "gap": "between events, ms",
    }
    for name, text in {**names, "e2e": "whole reply, ms"}.items():
        shown.add_row(text, *(f"{1e3 * summary[f'{name}_{word}']:.1f}" for word in ("p50", "p99")))
    console.print(
        f"{summary['requests']} requests in {summary['seconds']:.1f} s: "
        f"{summary['tokens_per_second']:.0f} tokens/s, {summary['requests_per_second']:.2f} "
        f"requests/s, {summary['goodput']:.2f} of them with a first token within "
        f"{loads.FIRST_SECONDS:g} s and {1e3 * loads.TOKEN_SECONDS:g} ms a token",
        highlight=False,
    )
    console.print(shown)


# Parts.


def _made(settings, variant) -> tuple[RunConfig, Any]:
    changes = [f"attention={variant}", f"train.context={settings.context}"]
    changes += [*settings.overrides, f"model.dtype={settings.dtype}"]
    config = load_config(settings.scale, changes)
    return config, jax.jit(init_parameters, static_argnums=(0, 1))(config.model, 0)


def _engine(config, params, settings, **how) -> Engine:
    engine = Engine(config.model, params, length=settings.context, **how)
    engine.warm()
    return engine


def _trace(settings) -> list[tuple[list[int], int]]:
    return loads.trace(Load(requests=settings.requests, longest=settings.context))


def _ratio(what, variant, over, under) -> Ratio:
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(what, variant, statistics.median(ratios), min(ratios), max(ratios))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _continuous(settings, variant, of, B) -> list[Ratio]:
    """Requests that enter as others end, over batches that wait for their longest."""
    engine, asked = of(B), _trace(settings)

    def continuous():
        engine.finish([engine.submit(prompt, n) for prompt, n in asked])

    def static():
        for first in range(0, len(asked), B):
            engine.finish([engine.submit(prompt, n) for prompt, n in asked[first : first + B]])

    arms: dict[Callable, list[float]] = {static: [], continuous: []}
    for _ in range(settings.samples + 1):
        for arm, seconds in arms.items():
            seconds.append(_seconds(arm))
            engine.reset()
    what = f"tokens/s, continuous over static batches, {B} at a time"
    static_s, continuous_s = arms.values()
    return [_ratio(what, variant, static_s[1:], continuous_s[1:])]


@partial(jax.jit, donate_argnums=1)
def _one_piece(model, cache, token_B, length_B):
    """`STEPS` greedy steps of sequences whose caches lie in one piece each: (cache, ...)."""

    def one(_, carry):
        cache, token_B, length_B = carry
        x_B1D, cache = model.decode(token_B[:, None], cache, length_B)
        token_B = jnp.argmax(model.logits(x_B1D)[:, 0], axis=1).astype(jnp.int32)
        return cache, token_B, length_B + 1

    return jax.lax.fori_loop(0, STEPS, one, (cache, token_B, length_B))


def _int8(settings, variant, made, B) -> list[Ratio]:
    """A step from an int8 cache over one from a whole cache."""
    config, params = made
    token_B, length_B = np.ones(B, np.int32), np.full(B, settings.context - 2 * STEPS, np.int32)
    models, caches = [], []
    for how in ("int8", "whole"):
        models.append(model_of(config.model.model_copy(update={"decode_cache": how}), params, None))
        caches.append(models[-1].init_cache(B, settings.context))
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(4 * settings.samples + 1):
        for place, model in enumerate(models):
            began = time.perf_counter()
            caches[place], *_ = jax.block_until_ready(
                _one_piece(model, caches[place], token_B, length_B)
            )
            seconds[place].append(time.perf_counter() - began)
    what = f"step, int8 cache over whole, {B} × {settings.context:,}"
    return [_ratio(what, variant, seconds[0][1:], seconds[1][1:])]


def _first(engine, prompt) -> float:
    """Seconds until a prompt's first token is read."""
    request = engine.submit(prompt, 2)

    def work():
        while len(request.tokens) == len(prompt):
            engine.advance()

    spent = _seconds(work)
    engine.finish([request])
    return spent


def _prefix(settings, variant, of, B) -> list[Ratio]:
    """The first token of a prompt of which 7/8 are cached, over that of a new one."""
    engine, random = of(B), np.random.default_rng(0)
    long = settings.context - PAGE
    shared = random.integers(1, 1000, long * 7 // 8 // PAGE * PAGE).tolist()

    def prompt(begin):
        return begin + random.integers(1, 1000, long - len(begin)).tolist()

    _first(engine, prompt(shared))
    cold, warm = [], []
    for _ in range(2 * settings.samples):
        cold.append(_first(engine, prompt([])))
        warm.append(_first(engine, prompt(shared)))
    what = f"first token, {len(shared)} of {long} tokens cached over none"
    return [_ratio(what, variant, warm, cold)]


def _equal_bytes(settings, made) -> list[Ratio]:
    """Two variants in as many bytes: texts that run at a time, and how long a first token takes.

    Requests then come by a Poisson process, at `BUSY` of the rate at which the first variant
    answers them when they are all there.
    """
    itemsize = jnp.dtype(settings.dtype).itemsize
    size = [cache_allocated_bytes_per_token(config.model, itemsize) for config, _ in made.values()]
    room = (2 * settings.context + PAGE) * size[0]
    rows = min(64, settings.requests)
    engines = [
        _engine(config, params, settings, batch=rows, cache_bytes=room)
        for config, params in made.values()
    ]
    mean, spent = [], []
    for engine in engines:
        requests, running = [engine.submit(prompt, n) for prompt, n in _trace(settings)], []
        began = time.perf_counter()
        while not all(request.done for request in requests):
            engine.advance()
            if engine.scheduler.waiting:  # as many run as fit
                running.append(len(engine.scheduler.running))
        spent.append(time.perf_counter() - began)
        mean.append(statistics.fmean(running or [rows]))
    rate = BUSY * settings.requests / spent[0]
    first, second = made
    variants = f"{second} over {first}"
    found = [_ratio("texts running in equal bytes", variants, [mean[1]], [mean[0]])]
    waits: list[list[list[float]]] = [[], []]
    for sample in range(settings.samples):
        for of, engine in zip(waits, engines, strict=True):
            engine.reset()
            of.append(sorted(_waits(engine, _trace(settings), rate, sample)))
    for name, share in (("half", 0.5), ("nine in ten", 0.9)):
        under, over = ([one[int(share * len(one))] for one in of] for of in waits)
        what = f"seconds within which {name} have a first token, equal bytes, Poisson"
        found.append(_ratio(what, variants, over, under))
    return found


def _waits(engine, asked, rate, seed) -> list[float]:
    """Seconds from each request's arrival to its first token; `rate` arrive in a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(asked))
    pending = deque(zip(np.cumsum(gaps).tolist(), asked, strict=True))
    here: list[tuple[float, Any]] = []
    waits: dict[int, float] = {}
    began = time.perf_counter()
    while pending or any(not request.done for _, request in here):
        now = time.perf_counter() - began
        while pending and pending[0][0] <= now:
            at, (prompt, n) = pending.popleft()
            here.append((at, engine.submit(prompt, n)))
        if not engine.advance() and pending:
            time.sleep(max(0.0, pending[0][0] - (time.perf_counter() - began)))
        now = time.perf_counter() - began
        for number, (at, request) in enumerate(here):
            if number not in waits and len(request.tokens) > request.prompt_length:
                waits[number] = now - at
    return list(waits.values())


def _http(settings, variant, of, B, config) -> list[Ratio]:
    """Tokens/s of streams over the same requests in process; in both somebody always waits."""
    from lrkv_jax.serving.server import serving
    from lrkv_jax.serving.service import Service, ServiceLimits
    from lrkv_jax.training.restore import TrainedRun

    engine = of(B)
    clients = 2 * B
    limits = ServiceLimits(2 * clients, tokens=2 * clients * settings.context)
    load = Load(requests=settings.requests, clients=clients, longest=settings.context)
    here, there = [], []
    for _ in range(settings.samples + 1):
        requests = [engine.submit(prompt, n) for prompt, n in loads.trace(load)]
        here.append(_seconds(partial(engine.finish, requests)))
        engine.reset()
        with serving(Service(TrainedRun(config, 0, None, None), engine, variant, limits)) as port:
            command = [
                sys.executable, "-m", "lrkv_jax.lab.bench.load", f"http://127.0.0.1:{port}",
                json.dumps(dataclasses.asdict(load)),
            ]  # fmt: skip
            found = subprocess.run(command, capture_output=True, text=True, check=True)
        there.append(json.loads(found.stdout)["seconds"])
        engine.reset()
    what = f"tokens/s, HTTP over in process, {B} at a time"
    return [_ratio(what, variant, here[1:], there[1:])]
