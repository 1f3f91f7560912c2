"""A run goes on where it stopped, writes what it did, and touches nobody else's directory."""

import hashlib
import io
import json

import chex
import jax
import numpy as np
import pytest
from rich.console import Console
from tiny import TINY

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.train.loop import train
from lrkv_jax.train.metrics import read_metrics
from lrkv_jax.train.restore import load_run
from lrkv_jax.train.run_dir import open_run, resolve

ONE = {"devices": jax.devices()[:1]}


def quiet():
    return Console(file=io.StringIO(), width=200)


def learnt(rows):
    """What must be equal bit for bit: no clocks."""
    keys = ("step", "loss", "bpb", "grad_norm", "lr_matrix", "validation_loss", "validation_bpb")
    return [{key: row.get(key) for key in keys} for row in rows]


def digest(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pages):
    """(configuration, result, printed text) of a run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    changes = [*pages, f"run_dir={directory}", "train.log_every=2", "train.validate_every=3"]
    config = load_config("configs/quickstart.yaml", [*TINY, *changes])
    console = quiet()
    return config, train(config, console=console, **ONE), console.file.getvalue()


def test_a_run_stopped_half_way_goes_on_bit_for_bit(tiny, whole):
    """Also where a kill left rows past the checkpoint, and a torn one."""
    half = tiny("train.log_every=2", "train.validate_every=3")
    stopped = train(half, until=3, console=quiet(), **ONE)
    assert (stopped.step, stopped.finished) == (3, False)
    metrics = stopped.run_dir / "metrics.jsonl"
    stray = json.dumps({**read_metrics(stopped.run_dir)[-1], "step": 4})
    metrics.write_text(metrics.read_text() + stray + "\n" + '{"step": 5, "lo')
    resumed = train(half, console=quiet(), **ONE)
    assert (resumed.step, resumed.finished) == (6, True)
    a, b = read_metrics(whole[1].run_dir), read_metrics(resumed.run_dir)
    assert [row["step"] for row in b] == [1, 2, 3, 4, 5, 6]
    assert learnt(a) == learnt(b)
    chex.assert_trees_all_equal(load_run(whole[1].run_dir).params, load_run(resumed.run_dir).params)


def test_a_run_directory_holds_what_the_readme_says(whole):
    config, result, printed = whole
    rows = read_metrics(result.run_dir)
    assert {p.name for p in result.run_dir.iterdir()} == {
        "config.yaml", "metrics.jsonl", "events", "checkpoints", "samples",
    }  # fmt: skip
    assert [r["step"] for r in rows if "validation_loss" in r] == [3, 6]
    for row in rows:
        assert row["tokens"] == row["step"] * 8 * 32
        assert row["flops"] > 0 and row["tokens_per_second"] > 0 and row["mfu"] is None
        assert 0 <= row["outside_step"] <= 1
        assert row["lr_embedding"] == pytest.approx(15 * row["lr_matrix"])
    assert rows[0]["loss"] == pytest.approx(np.log(4096), rel=1e-5)  # the head starts at zero
    assert rows[-1]["loss"] < rows[0]["loss"]
    saved = load_config(result.run_dir / "config.yaml")
    assert saved.model.dtype == "float32"
    assert saved.model.attention == config.model.attention
    assert (result.run_dir / "samples/step-00000006.txt").read_text().startswith("My fellow")
    assert "step 2/6" in printed and "held out: CE" in printed
    with Checkpointer(result.run_dir / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest()
    assert manifest["step"] == 6 and manifest["tokens"] == 6 * 256
    assert manifest["config"]["model"]["width"] == 32 and "jax" in manifest["versions"]


def test_a_finished_run_is_left_as_it_is(whole):
    config, result, _ = whole
    rows = (result.run_dir / "metrics.jsonl").read_bytes()
    console = quiet()
    again = train(config, console=console, **ONE)
    assert again.finished and again.step == 6
    assert "step 6 is done already" in console.file.getvalue()
    assert (result.run_dir / "metrics.jsonl").read_bytes() == rows


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("attention=mha", "model.attention"),
        ("attention.rank=2", "model.attention"),
        ("model.layers=1", "model.layers"),
        ("data.shuffle_seed=1", "data.shuffle_seed"),
        ("train.context=16", "train.context"),
    ],
)
def test_another_models_directory_is_refused_and_untouched(tiny, change, named):
    directory = open_run(resolve(tiny()))
    before = digest(directory)
    with pytest.raises(LrkvError, match=named) as error:
        train(tiny(change), console=quiet(), **ONE)
    assert "run_dir=" in str(error.value) and "\n" not in str(error.value)
    assert digest(directory) == before


def test_a_directory_that_is_no_run_is_refused_and_untouched(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("years of work")
    with pytest.raises(LrkvError, match="not a run"):
        train(tiny(), console=quiet(), **ONE)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mesh.data=3", "mesh.fsdp=1"), "do not multiply to the 8 devices"),
        (("mesh.tensor=8", "mesh.fsdp=1"), "does not divide model.heads = 4"),
        (("model.vocabulary=512",), "set model.vocabulary=4096"),
        (("optimizer.warmup=6",), "optimizer.warmup = 6"),
        (("train.context=1000000",), "longer than the data"),
        (("data.source=/nowhere/at/all",), "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_trained_stops_before_anything_is_written(
    tiny, tmp_path, overrides, message
):
    with pytest.raises(LrkvError, match=message) as error:
        train(tiny(*overrides), console=quiet())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_step_that_the_memory_cannot_hold_is_refused_before_anything_is_written(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("lrkv_jax.train.loop.memory_limit", lambda mesh: 100_000)
    with pytest.raises(LrkvError, match="needs .* for a training step and has 0.0001 GB"):
        train(tiny(), console=quiet(), **ONE)
    assert not (tmp_path / "run").exists()
