"""A tiny sweep of training steps from end to end: what is written, printed and refused."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from support.command import lrkv
from support.tiny import TINY

from lrkv_jax.lab.bench import clock, train
from lrkv_jax.lab.bench.report import MEASURED, WRONG, variants_of
from lrkv_jax.lab.bench.train import TrainBenchmark, tables
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.training.state import resolve

SMALL = TrainBenchmark(
    scales=("quickstart",), variants=("mha",), samples=3, depth=1,
    overrides=(*(text for text in TINY if not text.startswith(("variants.", "model.layers"))),
               "model.vocabulary=64", "optimizer.muon.iterations=1"),  # less to compile
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """Their rate itself is not tested."""
    monkeypatch.setattr(clock, "SIDE", 64)


@pytest.fixture
def on_one_device(monkeypatch):
    """`run` of settings, by itself and for the command, on one device of the eight."""
    alone = partial(train.run, devices=jax.devices()[:1])
    monkeypatch.setattr(train, "run", alone)
    return alone


@pytest.mark.slow
def test_the_command_leaves_a_row_that_adds_up(on_one_device, capsys, monkeypatch, tmp_path):
    how = ("--variants", "mha", "--samples", "3", "--depth", "1", "--json",
           "--out", str(tmp_path), *SMALL.overrides)  # fmt: skip
    code, out, _ = lrkv(capsys, monkeypatch, "bench", "train", *how)
    report = json.loads(out)
    assert code == 0 and report == json.loads((tmp_path / "train_cpu.json").read_text())
    assert report["settings"]["dtype"] == "float32" and report["devices"] == 1
    (row,) = (SimpleNamespace(**row) for row in report["rows"])
    assert row.status == MEASURED and row.samples == 3
    assert row.mesh == {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}
    assert (row.layers, row.scale_layers, row.vocabulary) == (1, 4, 64)
    assert 0 < row.ms_first_quartile <= row.ms <= row.ms_third_quartile
    assert row.tokens_per_second == pytest.approx(1e3 * 256 / row.ms)
    rate = 1e3 * row.flops_per_step / row.ms
    assert row.mfu_of_ceiling == pytest.approx(rate / row.ceiling_flops_per_second)
    assert row.mfu_of_datasheet is None  # a CPU
    assert row.loss == pytest.approx(math.log(64), rel=1e-4)
    assert row.time_over_mha == row.flops_over_mha == 1
    config = variants_of("quickstart", ("mha",), depth=1, overrides=SMALL.overrides)["mha"]
    assert row.flops_per_step == 256 * training_flops_per_token(config.model, 32)
    # Parameters, two moments of embedding and head, one of each matrix, and a batch of int32.
    assert 8 * row.parameters < row.state_bytes < 12 * row.parameters + 4 * 8 * 33 + 100
    assert row.state_bytes < row.peak_bytes and row.compile_seconds > 0
    assert variants_of("quickstart", ("mha",), depth=3)["mha"].model.unroll == 1  # divides it


def test_a_step_that_is_wrong_is_not_timed_and_one_that_cannot_start_stops_no_other(
    on_one_device, monkeypatch
):
    """Variants are compiled and started in no time; a step takes 3 s."""
    memory = SimpleNamespace(argument_size_in_bytes=4 << 30)
    step = SimpleNamespace(seconds=0.1, call=SimpleNamespace(memory_analysis=lambda: memory))
    settings = replace(SMALL, variants=("mqa", "mha"))
    made = variants_of("quickstart", settings.variants, depth=1, overrides=settings.overrides)
    first_loss = math.log(64)

    def start(config, *_):
        if config == resolve(made["mqa"]):
            raise RuntimeError("RESOURCE_EXHAUSTED: too large\nand a page of details")
        return first_loss, lambda: 3.0

    monkeypatch.setattr(train, "compile_step", lambda config, mesh: step)
    monkeypatch.setattr(train, "program_bytes", lambda program: 6 << 30)
    monkeypatch.setattr(train, "start", start)
    monkeypatch.setattr(clock, "memory_limit", lambda: 1 << 40)  # whatever else is running here
    report = on_one_device(settings)
    mqa, mha = report["rows"]
    assert mqa.status == "failed" and "too large" in mqa.reason and "\n" not in mqa.reason
    assert mha.status == MEASURED and mqa.time_over_mha is None
    assert f"- quickstart mqa: failed: {mqa.reason}" in tables(report)
    first_loss = 1.0
    (row,) = on_one_device(SMALL)["rows"]
    assert row.status == WRONG and row.ms is None and "not ln V = 4.159" in row.reason
