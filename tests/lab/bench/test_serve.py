"""A tiny comparison of serving from end to end, and a load on a server that misbehaves."""

import io
import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.command import lrkv

from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.agreement import agreement_on
from lrkv_jax.lab.bench import load as loads
from lrkv_jax.lab.bench.files import save
from lrkv_jax.lab.bench.load import Load
from lrkv_jax.lab.bench.serve import Settings, print_load, print_report, run
from lrkv_jax.training.restore import load_run

ROOT = Path(__file__).parents[3]
TINY = Settings(
    # Another number of texts would be another engine to compile for each variant.
    batches=(1,), context=256, requests=8, samples=1,
    overrides=("model.layers=1", "model.unroll=1", "model.width=48", "model.vocabulary=1024"),
)  # fmt: skip


@pytest.mark.slow
def test_every_ratio_is_measured_within_one_run(tmp_path):
    report = run(TINY)
    rows = {(row.what, row.variant): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 2 * 4 + 3
    for row in report["rows"]:
        assert 0 < row.least <= row.ratio <= row.most
    equal = rows["texts running in equal bytes", "lrkv_latent over mha"]
    assert equal.ratio > 1
    (path,) = save(report, tmp_path)
    assert len(json.loads(path.read_text())["rows"]) == len(rows)
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) <= 80 and "texts running" in out.getvalue()


def write_page(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["", *map(str, arguments)])
    runpy.run_path(str(ROOT / "experiments/serving_page.py"), run_name="__main__")


def test_the_page_s_tables_are_what_the_kept_results_give(tmp_path, monkeypatch):
    shutil.copy(ROOT / "docs/serving.md", tmp_path)
    write_page(monkeypatch, "--docs", tmp_path)
    assert (tmp_path / "serving.md").read_text() == (ROOT / "docs/serving.md").read_text()


@pytest.mark.slow
def test_what_looking_up_gains_is_measured_and_written(tmp_path, monkeypatch, finished_run):
    shutil.copy(ROOT / "docs/serving.md", tmp_path)
    few = ["--tokens", "8", "--texts", "2", "--batch", "2", "--samples", "1"]
    places = "--docs", tmp_path, "--results", tmp_path
    write_page(monkeypatch, "--lookup", finished_run.directory, *few, *places)
    rows = json.loads((tmp_path / "lookup_cpu.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["same"] and row["ratio"] > 0 for row in rows)
    assert finished_run.directory.name in (tmp_path / "serving.md").read_text()


@pytest.mark.slow
def test_what_an_int8_cache_costs_is_measured_and_written(tmp_path, monkeypatch, finished_run):
    shutil.copy(ROOT / "docs/serving.md", tmp_path)
    places = "--docs", tmp_path, "--results", tmp_path
    write_page(monkeypatch, "--int8", finished_run.directory, "--groups", "1", *places)
    (row,) = json.loads((tmp_path / "int8_cpu.json").read_text())["runs"]
    whole, int8 = row["whole"], row["int8"]
    assert whole["nats"] == pytest.approx(whole["forward_nats"], rel=1e-6)
    assert int8["nats"] == pytest.approx(whole["nats"], rel=1e-3)
    found = load_run(finished_run.directory, overrides=["model.decode_cache=int8"])
    error = agreement_on(found, np.arange(128).reshape(4, 32)).max_relative_error
    assert 1e-6 < error < 0.02  # a whole cache leaves some 1e-7
    assert int8["bytes_bf16"] < whole["bytes_bf16"]
    assert f"| run, {row['label']} |" in (tmp_path / "serving.md").read_text()


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
