"""What serving gains, as ratios within one run: `lrkv bench serve`.

Both sides of a ratio are measured in turns on the same machine, on random weights: times depend on
shapes, and requests end where the trace says.
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
from lrkv_jax.lab.bench import load as loads
from lrkv_jax.lab.bench.load import Load
from lrkv_jax.lab.bench.report import Progress, machine, silent, table, where
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.models.transformer import init_parameters

# Of the requests that an engine can answer, those that come.
BUSY = 0.8


@dataclass(frozen=True)
class ServeBenchmark:
    """What is measured, on which scale; the first variant is what the second is held against."""

    scale: str = "nano_family"
    variants: tuple[str, str] = ("mha", "lrkv_latent")
    batch: int = 8  # requests decoded together in the comparison with HTTP
    context: int = 1024
    requests: int = 64
    samples: int = 3
    overrides: tuple[str, ...] = ()  # of the scale
    dtype: str = "float32"


@dataclass
class Ratio:
    """A ratio: its median and extremes over the samples."""

    what: str
    variant: str
    ratio: float
    least: float
    most: float


def run(settings: ServeBenchmark, progress: Progress = silent) -> dict[str, Any]:
    """Measure every ratio. Raises `LrkvError` for a scale or a variant that there is not."""
    if settings.samples < 1 or settings.requests < settings.batch:
        raise LrkvError("samples: use 1 or more; requests: as many as --batch, or more")
    made = {variant: _made(settings, variant) for variant in settings.variants}
    rows: list[Ratio] = []
    for number, (variant, (config, params)) in enumerate(made.items()):
        progress(f"{variant}, HTTP", number, len(made) + 1)
        engine = _engine(config, params, settings, batch=settings.batch)
        rows.append(_http_over_in_process(settings, variant, engine, config))
    progress("equal bytes", len(made), len(made) + 1)
    rows += _equal_bytes(settings, made)
    progress("done", len(made) + 1, len(made) + 1)
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
    changes = [f"attention={variant}", f"train.seq_len={settings.context}"]
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
    found = [
        _ratio("texts running in equal bytes", variants, [mean[1]], [mean[0]]),
        _ratio("tokens/s in equal bytes", variants, [spent[0]], [spent[1]]),
    ]
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


def _http_over_in_process(settings, variant, engine, config) -> Ratio:
    """Tokens/s of streams over the same requests in process; in both somebody always waits."""
    from lrkv_jax.inference.trained_run import TrainedRun
    from lrkv_jax.serving.server import serving
    from lrkv_jax.serving.service import Service, ServiceLimits

    clients = 2 * settings.batch
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
    what = f"tokens/s, HTTP over in process, {settings.batch} at a time"
    return _ratio(what, variant, here[1:], there[1:])
