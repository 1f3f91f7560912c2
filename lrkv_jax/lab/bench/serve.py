"""The gain of a smaller cache in serving: two variants in as many bytes, as ratios of one run.

Both sides of a ratio are measured in turns on the same machine, on random weights: times depend on
shapes, and requests have the lengths of a trace. A server is loaded from outside by any client of
OpenAI's protocol, as `vllm bench serve`.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.config import load_config
from lrkv_jax.inference import Engine
from lrkv_jax.inference.pages import PAGE
from lrkv_jax.lab.bench import report
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.models.transformer import init_parameters

# Of the requests that an engine can answer, those that come.
BUSY = 0.8
SLOTS = 64  # requests that may be decoded together, if their cache fits

Trace = list[tuple[list[int], int]]  # prompt ids and new tokens of each request


@dataclass(frozen=True)
class ServeBenchmark:
    """The measurements, and their scale; the second variant is compared with the first."""

    scale: str = "nano_family"
    variants: tuple[str, str] = ("mha", "lrkv_latent")
    context: int = 1024
    requests: int = 64
    samples: int = 3
    overrides: tuple[str, ...] = ()  # of the scale
    dtype: str = "float32"

    def __post_init__(self):
        report.check_settings(self, "variants")


@dataclass
class Ratio:
    """A ratio: its median and extremes over the samples."""

    what: str
    ratio: float
    least: float
    most: float


def run(settings: ServeBenchmark, progress: report.Progress = report.silent) -> dict[str, Any]:
    """Measure every ratio of the second variant over the first.

    Requests first come all at once. Then they come by a Poisson process, at `BUSY` of the rate at
    which the first variant answered them. Raises `LrkvError` for a scale or a variant that there is
    not.
    """
    progress("compiling")
    first, second = _engines(settings)
    trace = random_trace(settings.requests, settings.context)
    progress("all requests at once")
    (running, seconds), (running_of_second, seconds_of_second) = (
        _all_at_once(engine, trace) for engine in (first, second)
    )
    rows = [
        _ratio("texts running", [running_of_second], [running]),
        _ratio("tokens/s", [seconds], [seconds_of_second]),
    ]
    waits: dict[Engine, list[list[float]]] = {first: [], second: []}
    rate = BUSY * settings.requests / seconds
    for sample in range(settings.samples):
        progress("requests at random", sample, settings.samples)
        for engine, of_engine in waits.items():
            engine.reset()
            of_engine.append(_waits(engine, trace, rate, sample))
    for name, share in (("half", 0.5), ("nine in ten", 0.9)):
        under, over = (
            [float(np.quantile(sample, share)) for sample in waits[engine]]
            for engine in (first, second)
        )
        rows.append(_ratio(f"seconds within which {name} have a first token", over, under))
    return {"benchmark": "serve", **report.machine(), "settings": asdict(settings), "rows": rows}


def tables(found: dict[str, Any]) -> str:
    """Each ratio with its range."""
    first, second = found["settings"]["variants"]
    cells = [
        [row.what, f"{row.ratio:.2f}", f"{row.least:.2f} to {row.most:.2f}"]
        for row in found["rows"]
    ]
    headers = (f"{second} over {first}, equal bytes", "measured", "range")
    return f"{report.where(found)}\n\n{tabulated(headers, cells, form='simple')}"


def random_trace(requests: int, longest: int, seed: int = 0) -> Trace:
    """Requests of log-normal lengths, half of `longest` at most; the same for the same seed."""
    random = np.random.default_rng(seed)
    prompts, news = (
        np.clip(random.lognormal(np.log(64), sigma, requests), 1, longest // 2).astype(int)
        for sigma in (0.7, 0.9)
    )
    return [
        (random.integers(1, 1000, prompt).tolist(), int(new))
        for prompt, new in zip(prompts, news, strict=True)
    ]


def _engines(settings: ServeBenchmark) -> list[Engine]:
    """An engine of each variant, with a cache of two texts of the first variant in full length."""
    changes = [f"train.seq_len={settings.context}", f"model.dtype={settings.dtype}"]
    models = [
        load_config(settings.scale, [f"attention={name}", *changes, *settings.overrides]).model
        for name in settings.variants
    ]
    itemsize = jnp.dtype(settings.dtype).itemsize
    room = (2 * settings.context + PAGE) * cache_allocated_bytes_per_token(models[0], itemsize)
    engines = []
    for model in models:
        params = jax.jit(init_parameters, static_argnums=(0, 1))(model, 0)
        slots = min(SLOTS, settings.requests)
        engine = Engine(model, params, length=settings.context, batch=slots, cache_bytes=room)
        engine.warm()
        engines.append(engine)
    return engines


def _ratio(what: str, over: Sequence[float], under: Sequence[float]) -> Ratio:
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(what, statistics.median(ratios), min(ratios), max(ratios))


def _all_at_once(engine: Engine, trace: Trace) -> tuple[float, float]:
    """(requests that run while others wait, on average; seconds until all are answered)."""
    requests, running = [engine.submit(prompt, new) for prompt, new in trace], []
    began = time.perf_counter()
    while not all(request.done for request in requests):
        engine.advance()
        if engine.scheduler.waiting:  # as many run as fit
            running.append(len(engine.scheduler.running))
    return statistics.fmean(running or [len(requests)]), time.perf_counter() - began


def _waits(engine: Engine, trace: Trace, rate: float, seed: int) -> list[float]:
    """Seconds from each request's arrival to its first token; `rate` arrive in a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(trace))
    pending = deque(zip(np.cumsum(gaps).tolist(), trace, strict=True))
    here: list[tuple[float, Any]] = []
    waits: dict[int, float] = {}
    began = time.perf_counter()
    while pending or any(not request.done for _, request in here):
        now = time.perf_counter() - began
        while pending and pending[0][0] <= now:
            arrived, (prompt, new) = pending.popleft()
            here.append((arrived, engine.submit(prompt, new)))
        if not engine.advance() and pending:
            time.sleep(max(0.0, pending[0][0] - (time.perf_counter() - began)))
        now = time.perf_counter() - began
        for number, (arrived, request) in enumerate(here):
            if number not in waits and len(request.tokens) > request.prompt_length:
                waits[number] = now - arrived
    return list(waits.values())
