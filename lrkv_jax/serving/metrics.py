"""What Prometheus reads: counts and times of replies, and the engine's state when it is asked."""

from collections.abc import Callable, Iterator, Sequence

import jax
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily

from lrkv_jax.serving.runner import Runner

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _Compiled:
    """How many programs this process has compiled, or found among those that are kept."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event, seconds, **about):
        self.count += event == "/jax/core/compile/backend_compile_duration"


COMPILED = _Compiled()


class _Counts:
    """Counts that others keep and that never fall, as counters: (name, help, how to read it)."""

    def __init__(self, series: Sequence[tuple[str, str, Callable[[], float]]]):
        self._series = series

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, text, read in self._series:
            yield CounterMetricFamily(f"lrkv_{name}", text, value=read())


class Metrics:
    """The series of one server; labels name routes and codes, never a request.

    `texts` and `tokens` tell how many texts are open, and how many tokens these may take.
    """

    def __init__(self, runner: Runner, texts: Callable[[], int], tokens: Callable[[], int]):
        disable_created_metrics()
        self.registry = registry = CollectorRegistry()

        def counter(name, text, *labels):
            return Counter(f"lrkv_{name}", text, labels, registry=registry)

        def times(name, text, buckets=_SECONDS):
            return Histogram(f"lrkv_{name}", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests that were answered.", "route", "code")
        self.refused = counter("overloaded", "Requests that were refused with 429.")
        self.aborted = counter("aborted", "Replies whose client went away.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("cached_tokens", "Tokens of prompts found in the cache.")
        self.new_tokens = counter("generation_tokens", "New tokens.")
        self.ended = counter("texts", "Texts that ended, by reason.", "reason")
        self.first = times("time_to_first_token_seconds", "From the request to its first token.")
        self.each = times(
            "time_per_output_token_seconds", "Of each token after the first.", _TOKEN_SECONDS
        )
        self.whole = times("request_seconds", "From the request to the end of its reply.")

        self._before = COMPILED.count
        engine = runner.engine
        # Later the buffers belong to a call that may be under way.
        cache_bytes = engine.report().cache_bytes

        def gauge(name, text, read):
            Gauge(f"lrkv_{name}", text, registry=registry).set_function(read)

        def pools(count):
            return lambda: sum(count(pool) for pool in engine.scheduler.pools)

        gauge("texts_running", "Texts that have a row.", lambda: len(engine.scheduler.running))
        gauge("texts_waiting", "Texts that wait for a row.", lambda: engine.scheduler.waiting)
        gauge("texts_open", "Texts that have not ended.", texts)
        gauge("tokens_open", "Tokens that open texts may take.", tokens)
        gauge("rows", "Texts that can run at a time.", lambda: engine.batch)
        gauge("pages", "Pages of the cache.", lambda: engine.pages * len(engine.scheduler.pools))
        gauge("pages_free", "Pages that nobody holds.", pools(lambda pool: pool.free))
        gauge("cache_bytes", "Bytes of the cache.", lambda: cache_bytes)
        gauge("silent_seconds", "Since the present call began.", lambda: runner.silent)

        scheduler, calls = engine.scheduler, engine.calls
        registry.register(
            _Counts([
                ("preemptions", "Texts that gave up their pages.", lambda: scheduler.gave_way),
                ("recomputed_tokens", "Tokens read again after it.", lambda: scheduler.read_again),
                ("drafted_tokens", "Tokens that were looked up.", lambda: calls.drafted),
                ("accepted_tokens", "Those that were chosen.", lambda: calls.accepted),
                ("compiled", "Programs compiled since the server was ready.", self._compiled),
                ("calls", "Calls of the engine.", lambda: runner.calls),
                ("call_seconds", "Seconds in them.", lambda: runner.seconds),
                ("faults", "Calls that failed.", lambda: runner.faults),
            ])
        )  # fmt: skip

    def _compiled(self):
        return COMPILED.count - self._before

    def text(self) -> bytes:
        """All series in Prometheus's text format."""
        return generate_latest(self.registry)
