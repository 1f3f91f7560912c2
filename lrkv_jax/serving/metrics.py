"""What Prometheus reads: counts and times of responses, and the engine's state at each read.

Names are vLLM's where it has the series, with the prefix lrkv.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily

from lrkv_jax.serving.engine_loop import EngineLoop

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _Counts:
    """Counts that others keep and that never fall, as counters: (name, help, how to read it)."""

    def __init__(self, series: Sequence[tuple[str, str, Callable[[], float]]]):
        self._series = series

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, text, read in self._series:
            yield CounterMetricFamily(f"lrkv_{name}", text, value=read())


class Metrics:
    """The series of one server; labels name routes and codes, never a request.

    `opened` returns how many completions run or wait.
    """

    def __init__(self, engine_loop: EngineLoop, opened: Callable[[], int]):
        disable_created_metrics()
        self.registry = registry = CollectorRegistry()

        def counter(name, text, *labels):
            return Counter(f"lrkv_{name}", text, labels, registry=registry)

        def times(name, text, buckets=_SECONDS):
            return Histogram(f"lrkv_{name}", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests that were answered.", "route", "code")
        self.refused = counter("overloaded", "Requests that were refused with 429.")
        self.aborted = counter("aborted", "Responses whose client went away.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prefix_cache_hits", "Tokens of prompts found in the cache.")
        self.generation_tokens = counter("generation_tokens", "New tokens.")
        self.finished = counter("request_success", "Texts that ended.", "finished_reason")
        self.first_token = times("time_to_first_token_seconds", "From the request.")
        self.output_token = times(
            "time_per_output_token_seconds", "Of each token after the first.", _TOKEN_SECONDS
        )
        self.whole = times("e2e_request_latency_seconds", "From the request to its last token.")

        engine = engine_loop.engine
        # Later the buffers belong to a call that may be under way.
        cache_bytes = engine.report().cache_bytes

        def gauge(name, text, read):
            Gauge(f"lrkv_{name}", text, registry=registry).set_function(read)

        def used():
            pools = engine.scheduler.pools
            return 1 - sum(pool.free for pool in pools) / (engine.pages * len(pools))

        running = "Texts that are decoded."
        gauge("num_requests_running", running, lambda: len(engine.scheduler.running))
        gauge("num_requests_waiting", "Texts that wait.", lambda: engine.scheduler.waiting)
        gauge("num_requests_open", "Texts that have not ended.", opened)
        gauge("kv_cache_usage_perc", "Share of the pages in use, from 0 to 1.", used)
        gauge("kv_cache_bytes", "Bytes of the cache.", lambda: cache_bytes)
        registry.register(
            _Counts([
                ("num_preemptions", "They gave up pages.", lambda: engine.scheduler.preemptions),
                ("recomputed_tokens", "After it.", lambda: engine.scheduler.recomputed_tokens),
                ("engine_faults", "Calls that failed.", lambda: engine_loop.faults),
            ])
        )  # fmt: skip

    def text(self) -> bytes:
        """All series in Prometheus's text format."""
        return generate_latest(self.registry)
