"""A run goes on where it stopped, writes what it did, and touches nobody else's directory."""

import io
import json
import shutil
import sys

import chex
import jax
import numpy as np
import pytest
from rich.console import Console
from support.full import full_output

from lrkv_jax.config import load_config
from lrkv_jax.distributed.stopping import Stopping
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.restore import load_run

ONE = {"devices": jax.devices()[:1]}


# What must be equal bit for bit: no clocks.
LEARNT = ("step", "loss", "bpb", "grad_norm", "lr_matrix", "validation_loss", "validation_bpb")


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, finished_run):
    """(configuration, directory, printed text) of a run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(finished_run.directory, directory)
    config = finished_run.config.model_copy(update={"run_dir": str(directory)})
    return config, directory, finished_run.printed


def test_a_run_stopped_half_way_goes_on_bit_for_bit(tiny, whole):
    """Also where a kill left rows past the checkpoint and a torn one, and stdout is full (A5)."""
    stopping = Stopping()
    stopping.due = iter([False, False, True]).__next__  # in the last step: it cuts nothing short
    half = tiny("train.log_every=2", "train.validate_every=3", "train.profile=2:3")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    stopped = train(half, until=3, stopping=stopping, console=terminal, **ONE)
    assert (stopped.step, stopped.finished, stopped.stopped) == (3, False, False)
    shown = terminal.file.getvalue()  # A19: "compiling" came after "compiled in"
    assert "making the parameters ..." in shown and "restoring" not in shown
    assert -1 < shown.find("compiling ...") < shown.find("compiled in")
    # What TensorBoard's profile tab reads, of this start's steps alone.
    (trace,) = (stopped.run_dir / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000
    metrics = stopped.run_dir / "metrics.jsonl"
    stray = json.dumps({**read_metrics(stopped.run_dir)[-1], "step": 4})
    metrics.write_text(metrics.read_text() + stray + "\n" + '{"step": 5, "lo')
    with full_output() as full:
        resumed = train(half, console=Console(file=full), **ONE)
    assert (resumed.step, resumed.finished) == (6, True)
    a, b = read_metrics(whole[1]), read_metrics(resumed.run_dir)
    assert [row["step"] for row in b] == [1, 2, 3, 4, 5, 6]
    for key in LEARNT:
        assert [row.get(key) for row in a] == [row.get(key) for row in b], key
    chex.assert_trees_all_equal(load_run(whole[1]).params, load_run(resumed.run_dir).params)


def test_a_run_directory_holds_what_the_readme_says(whole):
    config, directory, printed = whole
    rows = read_metrics(directory)
    assert {p.name for p in directory.iterdir()} == {
        "config.yaml", "history.jsonl", "metrics.jsonl", "events", "checkpoints", "samples",
    }  # fmt: skip
    assert [r["step"] for r in rows if "validation_loss" in r] == [3, 6]
    for row in rows:
        assert row["tokens"] == row["step"] * 8 * 32 and row["flops"] > 0
        assert row["tokens_per_second"] > 0 and 0 <= row["host_share"] <= 1
    assert rows[0]["loss"] == pytest.approx(np.log(4096), rel=1e-5)  # the head starts at zero
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["compile_seconds"] > 0 and "compile_seconds" not in rows[1]
    # The last step's whole split, and the batches of before, which can be compared (A20).
    assert rows[-1]["validation_tokens"] > rows[2]["validation_tokens"]
    assert rows[-1]["val_loss_subset"] != rows[-1]["validation_loss"]
    assert "val_loss_subset" not in rows[2]
    assert load_config(directory / "config.yaml").model.attention == config.model.attention
    assert (directory / "samples/step-00000006.txt").read_text().startswith("My fellow")
    assert "held out, 2 batches: CE" in printed and "held out, whole split: CE" in printed
    with Checkpointer(directory / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest()
    assert manifest["step"] == 6 and manifest["tokens"] == 6 * 256
    assert manifest["config"]["model"]["width"] == 32 and "jax" in manifest["versions"]


def test_without_wandb_its_logging_is_refused_before_anything_is_written(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LrkvError, match="pip install 'lrkv-jax.wandb.'"):
        train(tiny("logging.wandb=true"), console=quiet(), **ONE)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_as_it_is(whole):
    config, directory, _ = whole
    rows = (directory / "metrics.jsonl").read_bytes()
    again = train(config, console=quiet(), **ONE)
    assert again.finished and again.step == 6
    assert (directory / "metrics.jsonl").read_bytes() == rows


def test_a_directory_that_is_no_run_is_refused_and_untouched(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("years of work")
    with pytest.raises(LrkvError, match="not a run"):
        train(tiny(), console=quiet(), **ONE)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.data=3", "must multiply to the number of devices, 8"),
        ("train.profile=3:2", "train.profile = 3:2: write the first step, then the last"),
        ("train.seq_len=1000000", "longer than the data"),
        ("data.source=/nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_trained_stops_before_anything_is_written(tiny, tmp_path, override, message):
    with pytest.raises(LrkvError, match=message) as error:
        train(tiny(override), console=quiet())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
