"""What a run shows and writes survives full disks, odd encodings and edited logs."""

import io
import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from support.full import full_output

from lrkv_jax.config.schema import WatchdogConfig
from lrkv_jax.distributed.hardware import HARDWARE, hardware, hardware_of
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.metrics import Meter, MetricsLog, WandB, read_metrics
from lrkv_jax.training.progress import ProgressDisplay

ROW = {"step": 7, "loss": 1.5, "tokens_per_second": 2e4, "mfu": None, "skipped": 0, "bpb": 1.0,
       "grad_norm": 0.5}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_an_output_that_is_full_ends_nothing(terminal):
    with full_output() as full:
        console = Console(file=full, force_terminal=terminal)
        with ProgressDisplay(console, WatchdogConfig(), Processes()) as progress:
            progress.info("a line that stays")
            with progress.doing("compile", 0):
                progress.warn("one that stands out")
            with progress.steps("lrkv", 0, 10, 1), progress.doing("validation", 7):
                progress.step(ROW)


def test_characters_that_the_output_cannot_encode_are_escaped():
    raw = io.BytesIO()
    with ProgressDisplay(
        Console(file=io.TextIOWrapper(raw, "latin-1")), WatchdogConfig(), Processes()
    ) as progress:
        progress.info("caf\u00e9 \u2192 \ud800 [/b]")
    assert raw.getvalue() == b"caf\xe9 \\u2192 \\ud800 [/b]\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_line_of_a_large_run_fits_80_columns_and_has_the_days_left(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, no_color=True)
    large = {"tokens_per_second": 1.2e6, "mfu": 0.43, "validation_loss": 2.4, "memory_bytes": 12e10}
    progress = ProgressDisplay(console, WatchdogConfig(), Processes())
    with progress, progress.steps("lrkv_latent", 0, 190_734, 1):
        progress._began -= 86_400
        progress.step(ROW | large | {"step": 12_345})
    line = r"12345/190734 loss 1.500 1,200k tok/s MFU 43% val 2.400 120 GB \S+ left$"
    line = line if terminal else r"left 14 days, [\d:]+$"
    assert re.search(line, console.file.getvalue(), re.M)


@pytest.fixture
def setup(tmp_path):
    config = SimpleNamespace(model_dump=lambda mode: {"name": "tiny"})
    return SimpleNamespace(directory=tmp_path, config=config)


FIRST = {"validation_loss": 3.0, "validation_tokens": 10}
LAST = {"validation_loss": 2.5, "validation_tokens": 90, "val_loss_subset": 2.0,
        "val_bpb_subset": 1.0}  # fmt: skip


def logged(setup, warn):
    """Two starts of a run that logs two steps each."""
    for start, rows in ((0, ({}, FIRST)), (2, ({}, LAST))):
        also = WandB(setup, warn)
        with MetricsLog(setup.directory, start_step=start, warn=warn, also=also) as log:
            for step, more in enumerate(rows, start + 1):
                log.row({"step": step, "loss": 1.0 / step, "batch": "ab"} | more)


def test_weights_and_biases_gets_the_scalars_of_both_starts_in_one_run(setup, monkeypatch):
    """A curve is of one text: that of the whole split has a name of its own."""
    monkeypatch.setitem(sys.modules, "wandb", fake := MagicMock())
    logged(setup, pytest.fail)
    run, starts = fake.init.return_value, [call.kwargs for call in fake.init.call_args_list]
    assert starts[0] == starts[1] and starts[0]["resume"] == "allow" and len(starts[0]["id"]) == 8
    assert run.finish.call_count == 2
    logs = [call.args[0] for call in run.log.call_args_list]
    assert [row["step"] for row in logs] == [1, 2, 3, 4]
    assert logs[2] == {"step": 3, "train/loss": 1 / 3}
    curves = {name: [row[name] for row in logs if name in row] for name in logs[1] | logs[3]}
    assert curves["val/loss"] == [3.0, 2.0]
    assert curves["val/final_loss"] == [2.5]
    assert curves["val/tokens"] == [10] and curves["val/final_tokens"] == [90]
    data = b"".join(path.read_bytes() for path in (setup.directory / "events").iterdir())
    assert [data.count(name) for name in (b"/loss", b"val/final_loss")] == [6, 1]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_weights_and_biases_that_fails_ends_nothing(setup, monkeypatch, broken):
    monkeypatch.setitem(sys.modules, "wandb", fake := MagicMock())
    of = fake if broken == "init" else fake.init.return_value
    getattr(of, broken).side_effect = ConnectionError("no\nroute")
    warnings = []
    logged(setup, warnings.append)
    line = "Weights & Biases fails (ConnectionError: no route): training continues without it"
    assert warnings == [line] * 2
    assert [row["step"] for row in read_metrics(setup.directory)] == [1, 2, 3, 4]


def test_a_log_that_resumes_has_each_step_once_in_order(tmp_path):
    row = {"loss": 1.0, "outside_step": 0.5, "sampled_loss": 2.0}
    old = [row | {"step": step} for step in (1, 3, 2, 2, 4, 7, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in old))
    assert read_metrics(tmp_path)[0]["host_share"] == 0.5, "as an earlier version called it"
    with MetricsLog(tmp_path, start_step=6, warn=print) as log:
        log.row({"step": 7, "loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 7]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_s_speed_is_by_its_own_time_and_the_devices_datasheet(monkeypatch, dtype):
    """Which has one peak, that of bfloat16."""
    times = iter([10.0, 11.5, 12.0])  # the row before, until the host waits, until it is there
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    device = SimpleNamespace(device_kind="NVIDIA H200")
    setup = MagicMock(tokens_per_step=1000, flops_per_token=5e9)
    setup.mesh = SimpleNamespace(devices=np.array([device, device]), size=2)
    setup.config.model.dtype = dtype
    row = Meter(setup).row(3, {"loss": jnp.float32(2)})
    assert [row[key] for key in ("tokens_per_second", "seconds", "host_share")] == [500, 2, 0.75]
    mfu = pytest.approx(500 * 5e9 / (2 * 989.5e12), rel=1e-12)
    assert row["mfu"] == (mfu if dtype == "bfloat16" else None)


def test_a_name_or_what_jax_calls_a_device_finds_it():
    assert hardware("H200").name == "H200 SXM"
    with pytest.raises(LrkvError, match="'tpu' is unknown: use a100, h100, h200, b200$"):
        hardware("tpu")
    kinds = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"
    for kind, device in zip(kinds, HARDWARE.values(), strict=True):
        assert hardware_of(kind) is device
    others = "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu"
    for kind in others:
        assert hardware_of(kind) is None, kind
