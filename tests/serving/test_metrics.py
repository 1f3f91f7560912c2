"""What Prometheus reads of a server, without one."""

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from lrkv_jax.serving.metrics import Metrics

COUNTS = ("preemptions", "recomputed_tokens", "drafted_tokens", "accepted_tokens", "compiled",
          "calls", "call_seconds", "faults")  # fmt: skip
LEVELS = ("texts_running", "texts_waiting", "pages", "pages_free", "silent_seconds")


def test_what_never_falls_is_a_counter_and_ends_in_total():
    scheduler = SimpleNamespace(pools=[], running=[], waiting=0, gave_way=3, read_again=40)
    engine = SimpleNamespace(
        scheduler=scheduler, calls=SimpleNamespace(drafted=5, accepted=4), batch=2, pages=8,
        report=lambda: SimpleNamespace(cache_bytes=1024),
    )  # fmt: skip
    runner = SimpleNamespace(engine=engine, calls=7, seconds=1.5, faults=1, silent=0.0)
    metrics = Metrics(runner, lambda: 0, lambda: 0)
    found = {}
    for _ in range(2):
        families = text_string_to_metric_families(metrics.text().decode())
        found = {family.name.removeprefix("lrkv_"): family for family in families}
    assert {found[name].type for name in COUNTS} == {"counter"}
    assert {found[name].type for name in LEVELS} == {"gauge"}
    assert found["preemptions"].samples[0].name == "lrkv_preemptions_total"
    values = [found[name].samples[0].value for name in COUNTS if name != "compiled"]
    assert values == [3, 40, 5, 4, 7, 1.5, 1]
