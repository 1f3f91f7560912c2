"""A tiny comparison of serving from end to end, and a load on a server that misbehaves."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from support.command import lrkv

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import load as loads
from lrkv_jax.lab.bench.load import Load
from lrkv_jax.lab.bench.report import save
from lrkv_jax.lab.bench.serve import ServeBenchmark, print_load, print_report, run

TINY = ServeBenchmark(
    # Another number of texts would be another engine to compile for each variant.
    batch=1, context=256, requests=8, samples=1,
    overrides=("model.layers=1", "model.unroll=1", "model.width=48", "model.vocabulary=1024"),
)  # fmt: skip


@pytest.mark.slow
def test_every_ratio_is_measured_within_one_run(tmp_path):
    report = run(TINY)
    rows = {(row.what, row.variant): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 2 + 4
    for row in report["rows"]:
        assert 0 < row.least <= row.ratio <= row.most
    equal = rows["texts running in equal bytes", "lrkv_latent over mha"]
    assert equal.ratio > 1
    (path,) = save(report, tmp_path)
    assert len(json.loads(path.read_text())["rows"]) == len(rows)
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) <= 80 and "texts running" in out.getvalue()


def test_a_trace_is_the_same_again_and_its_lengths_fit():
    load = Load(requests=200, longest=256)
    asked = loads.trace(load)
    assert asked == loads.trace(load) != loads.trace(Load(requests=200, longest=256, seed=1))
    lengths = np.array([(len(prompt), new) for prompt, new in asked])
    assert lengths.min() >= 1 and lengths.max() == 128 and 40 < np.median(lengths[:, 0]) < 90


def test_waits_are_of_first_and_further_events():
    done = [
        {"began": 1.0, "moments": [1.5, 1.7, 2.5], "tokens": 11},
        {"began": 2.0, "moments": [4.0], "tokens": 1},
    ]
    found = loads.summary(done, 4.0)
    assert found["tokens_per_second"] == 3.0 and found["goodput"] == 0.25
    assert found["ttft_p50"] == pytest.approx(1.25) and found["tpot_p50"] == pytest.approx(0.1)
    assert found["gap_p99"] == pytest.approx(0.8, abs=0.01) and found["e2e_p50"] == 1.75
    out = io.StringIO()
    print_load(found, Console(file=out, width=80))
    assert "first token, ms" in out.getvalue()


def test_no_server_and_no_address_are_one_line(capsys, monkeypatch):
    for url, message in (("ftp://x", "is no address"), ("http://127.0.0.1:9", "requests failed")):
        code, _, errors = lrkv(capsys, monkeypatch, "bench", "serve", "--url", url, "--requests", 2)
        assert code == 2 and message in errors and errors.count("\n") == 1
    with pytest.raises(LrkvError, match="above 0"):
        Load(rate=0.0)
