"""A run goes on where it stopped, as the run it was, and touches nobody else's directory."""

import io
import itertools
import json
import os
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from support.full import full_output

from lrkv_jax.config import load_config
from lrkv_jax.config.history import read_history
from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.loader import make_loader
from lrkv_jax.distributed.compilation import Compiled
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.distributed.stopping import Stopping
from lrkv_jax.distributed.watchdog import Watchdog
from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_UNAVAILABLE, LrkvError
from lrkv_jax.lab.report.comparison.files import read_run_record
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.training.checkpointing import Checkpointer, layout
from lrkv_jax.training.loop import _fitting, train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.resume import changed_data, order_moved
from lrkv_jax.training.run_dir import open_run, read_run, record_start
from lrkv_jax.training.state import resolve

ONE = {"devices": jax.devices()[:1]}
# What must be equal bit for bit: no clocks.
LEARNT = ("step", "loss", "bpb", "grad_norm", "lr_matrix", "validation_loss", "validation_bpb",
          "val_loss_subset")  # fmt: skip


def quiet():
    return Console(file=io.StringIO(), width=200)


def stopping_after(count):
    """Asks the run to stop once it has gone on this many times, after a step or before a batch."""
    stopping = Stopping()
    stopping.due = itertools.chain([False] * count, itertools.repeat(True)).__next__
    return stopping


@pytest.fixture(scope="module")
def whole(tmp_path_factory, finished_run):
    """(configuration, directory, printed text) of a run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(finished_run.directory, directory)
    config = finished_run.config.model_copy(update={"run_dir": str(directory)})
    return config, directory, finished_run.printed


@pytest.mark.slow
def test_a_run_stopped_half_way_goes_on_bit_for_bit(tiny, whole):
    """Also where a kill left rows past the checkpoint and a torn one, and stdout is full (A5)."""
    stopping = stopping_after(4)  # in the last step: it cuts nothing short
    more = "train.profile=2:3", "train.sample_tokens=8"
    half = tiny("train.log_every=2", "train.validate_every=3", *more)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    assert train(half, until=0, console=quiet(), **ONE).step == 0
    stopped = train(half, until=3, stopping=stopping, console=terminal, **ONE)
    assert (stopped.step, stopped.finished, stopped.stopped) == (3, False, False)
    shown = terminal.file.getvalue()  # "compiling" came after "compiled in"
    assert "making the parameters ..." in shown and "restoring" not in shown
    assert -1 < shown.find("compiling ...") < shown.find("compiled in")
    # What TensorBoard's profile tab reads, of this start's steps alone.
    (trace,) = (stopped.run_dir / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000
    metrics = stopped.run_dir / "metrics.jsonl"
    stray = json.dumps({**read_metrics(stopped.run_dir)[-1], "step": 4})
    metrics.write_text(metrics.read_text() + stray + "\n" + '{"step": 5, "lo')
    # In the last validation, whose step is saved by then: three steps, and two batches of before.
    stopped = train(half, stopping=stopping_after(6), console=quiet(), **ONE)
    assert (stopped.step, stopped.finished, stopped.stopped) == (6, False, True)
    assert "validation_loss" not in read_metrics(stopped.run_dir)[-1]
    with full_output() as full:
        resumed = train(half, console=Console(file=full), **ONE)
    assert (resumed.step, resumed.finished) == (6, True)
    a, b = read_metrics(whole[1]), read_metrics(resumed.run_dir)
    assert [row["step"] for row in b] == [1, 2, 3, 4, 5, 6]
    for key in LEARNT:
        assert [row.get(key) for row in a] == [row.get(key) for row in b], key
    chex.assert_trees_all_equal(load_run(whole[1]).params, load_run(resumed.run_dir).params)
    sample = resumed.run_dir / "samples/step-00000006.txt"
    assert sample.read_text().startswith("My fellow")


def test_a_run_directory_holds_what_the_readme_says(whole):
    config, directory, printed = whole
    rows = read_metrics(directory)
    assert {p.name for p in directory.iterdir()} == {
        "config.yaml", "history.jsonl", "metrics.jsonl", "events", "checkpoints",
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
    assert printed.startswith("building the records of ") and "texts, 96,061 bytes: " in printed
    assert "held out, 2 batches: CE" in printed and "held out, whole split: CE" in printed
    with Checkpointer(directory / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest()
    assert manifest["step"] == 6 and manifest["tokens"] == 6 * 256
    assert manifest["config"]["model"]["width"] == 32 and "jax" in manifest["versions"]


def test_a_validation_that_was_stopped_is_all_that_is_done_again(whole, tmp_path, monkeypatch):
    """No step is compiled, and the watchdog times each batch by itself.

    Text that joins the source meanwhile is not held out.
    """
    run = shutil.copytree(whole[1], tmp_path / "run")
    texts = shutil.copytree(whole[0].data.source, tmp_path / "texts")
    config = load_config(run / "config.yaml", [f"run_dir={run}", f"data.source={texts}"])
    rows, manifest = read_metrics(run), layout.read_manifest(run / "checkpoints/6")
    lacking = {name: value for name, value in rows[-1].items() if not name.startswith("val")}
    text = "".join(json.dumps(row) + "\n" for row in [*rows[:-1], lacking])
    (run / "metrics.jsonl").write_text(text)
    layout.write_manifest(run / "checkpoints/6", manifest | {"validation_loss": None})
    monkeypatch.setattr("lrkv_jax.training.loop.compiled_step", None)
    stopped = train(config, stopping=stopping_after(5), console=quiet(), **ONE)
    assert (stopped.finished, stopped.stopped) == (False, True)
    assert read_metrics(run)[-1] == lacking and not read_run_record(run).finished

    def grow(activity, _):
        if activity == "validation":
            shutil.copy(texts / "00.txt", texts / "22.txt")  # which is held out

    monkeypatch.setattr(Watchdog, "at", at := Mock(side_effect=grow))
    again = train(config, console=quiet(), **ONE)
    assert again.finished and read_metrics(run) == rows
    assert layout.read_manifest(run / "checkpoints/6") == manifest
    assert at.call_args_list.count(call("validation", 6)) > again.validation.tokens / (8 * 32)


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
    (tmp_path / "run/thesis.txt").rename(tmp_path / "run/.config.yaml.aB3_x.part")
    open_run(resolve(tiny()))  # what a kill left of the write that makes it one
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.data=3", "must multiply to the number of devices, 8"),
        ("train.profile=3:2", "train.profile = 3:2: write the first step, then the last"),
        ("train.seq_len=1000000", "longer than the data"),
        ("data.source=/nowhere/at/all", "/nowhere/at/all"),
        ("logging.wandb=true", "pip install 'lrkv-jax.wandb.'"),
    ],
)
def test_what_cannot_be_trained_stops_before_anything_is_written(
    tiny, tmp_path, monkeypatch, override, message
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LrkvError, match=message) as error:
        train(tiny(override), console=quiet())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def ended(finished_run):
    """The finished run's directory, and its configuration with other settings."""

    def config(*overrides, run=finished_run.directory):
        return load_config(finished_run.directory / "config.yaml", [f"run_dir={run}", *overrides])

    return SimpleNamespace(config=config, run=finished_run.directory)


@pytest.mark.parametrize("change", ["attention=mha", "train.seed=9", "train.steps=5"])
def test_another_setting_that_changes_the_result_is_refused_with_its_values(ended, change):
    """Of each setting's role, tests/config/test_settings.py."""
    before = {path: path.read_bytes() for path in ended.run.glob("*.*")}
    key, _, value = change.partition("=")
    key = "model.attention" if "attention" in key else key
    with pytest.raises(LrkvError) as error:
        open_run(resolve(ended.config(change)))
    said = str(error.value)
    assert f" {key} = " in said and value.lower() in said.lower()
    # Another model's arrays cannot be restored into, whatever is let through.
    way = "run_dir=PATH" if key == "model.attention" else f"--allow-change {key}"
    assert said.endswith(way) and "\n" not in said
    assert {path: path.read_bytes() for path in ended.run.glob("*.*")} == before


@pytest.mark.slow
def test_an_allowed_change_is_taken_and_written_into_the_history(ended, tmp_path):
    run = shutil.copytree(ended.run, tmp_path / "[/b]x")  # which rich would read as markup (A21)
    settings = "global_batch_size=4", "seq_len=16", "steps=8", "max_checkpoints=3"
    other = ended.config(*(f"train.{one}" for one in settings), run=run)
    allow = ["train.seq_len", "train.global_batch_size"]
    refusals = "train.seq_len = 32, and 16", "train.global_batch_size = 8, and 4"
    for count, refusal in enumerate(refusals):
        with pytest.raises(LrkvError, match=f"{refusal} is asked for"):
            train(other, allow=allow[:count], console=quiet(), **ONE)
    console = quiet()
    result = train(other, allow=allow, until=7, console=console, **ONE)
    rows = read_metrics(run)
    assert result.step == 7 and len(rows) == 7
    with Checkpointer(run / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest(7)
    assert [manifest["tokens"], rows[-1]["tokens"]] == [6 * 8 * 32 + 4 * 16] * 2
    # Attention over fewer positions takes fewer operations a token.
    per_token = training_flops_per_token(other.model, 16)
    assert per_token < training_flops_per_token(other.model, 32)
    assert rows[-1]["flops"] == manifest["flops"] == rows[5]["flops"] + 4 * 16 * per_token
    assert "from step 6 on, train.global_batch_size is 4, not 8" in console.file.getvalue()
    assert read_run(run).train.global_batch_size == 4 and read_run(run).train.steps == 8
    rows = read_history(run)
    assert [(row["event"], row["step"]) for row in rows[:2]] == [("start", 0), ("start", 6)]
    assert {row["key"]: (row["step"], row["role"], row["old"], row["new"]) for row in rows[2:]} == {
        "train.global_batch_size": (6, "semantics", 8, 4),
        "train.seq_len": (6, "semantics", 32, 16),
        "train.steps": (6, "semantics", 6, 8),  # a run may become longer, and that is recorded
        "train.max_checkpoints": (6, "schedule", 2, 3),
        "run_dir": (6, "placement", str(ended.run), str(run)),
    }


def test_a_change_that_cannot_be_allowed_is_named(ended):
    for allow, message in (
        ("train.seq_lem", "did you mean train.seq_len"),
        ("train.max_checkpoints", "no setting that changes results"),
    ):
        with pytest.raises(LrkvError, match=message):
            open_run(resolve(ended.config()), [allow])


def test_data_are_what_they_hold_and_not_where_they_lie(ended, tmp_path):
    with Checkpointer(ended.run / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest()
    texts = shutil.copytree(ended.config().data.source, tmp_path / "elsewhere")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(read_asset("sotu-4096.json"))
    places = f"data.source={texts}", f"data.directory={tmp_path / 'data'}"

    def changes(*overrides, allow=(), manifest=manifest):
        config = ended.config(*places, f"data.tokenizer={tokenizer}", *overrides)
        return changed_data(
            config, make_loader(config.data, 32, config.train.global_batch_size), manifest, allow
        )

    assert changes() == []
    open_run(resolve(ended.config(*places, f"data.tokenizer={tokenizer}")))
    # The same files give other batches.
    saved = manifest["loader"] | {"next_batch": "0123456789ab"}
    with pytest.raises(LrkvError, match="next_batch 0123456789ab.*--allow-change data.source"):
        changes(manifest=manifest | {"loader": saved})
    assert changes("train.global_batch_size=16", allow=["train.global_batch_size"]) == []
    for batch, moved in ((8, ""), (16, "behind 96: 48 are left out"), (4, "24: 24 are read again")):
        setup = SimpleNamespace(config=ended.config(f"train.global_batch_size={batch}"))
        assert order_moved(setup, manifest).endswith(moved) and bool(moved) == (batch != 8)
    # The same names hold something else.
    first = sorted(texts.iterdir())[0]
    stat = first.stat()
    first.write_text(first.read_text()[::-1])
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(LrkvError, match=r"data.source = .*/texts \(sources .*elsewhere \(sources"):
        changes()
    (change,) = changes(allow=["data.source"])
    assert (change.key, change.role) == ("data.source", "data")
    tokenizer.write_text(json.dumps(json.loads(read_asset("sotu-4096.json"))))
    with pytest.raises(LrkvError, match=r"data.tokenizer = .*--allow-change data.tokenizer"):
        changes(allow=["data.source"])
    # A resume asks this, and records no start.
    run = shutil.copytree(ended.run, tmp_path / "run")
    config = ended.config(f"data.tokenizer={tokenizer}", run=run)
    with pytest.raises(LrkvError, match="the run was trained with data.tokenizer"):
        train(config, console=quiet(), **ONE)
    assert len(read_history(run)) == 1


@pytest.mark.parametrize(
    "name", ["file", "file/below", "x" * 300, "/sys/run", "a[1]", "a\\b"], ids=lambda n: n[:9]
)
def test_a_directory_that_cannot_be_made_is_one_line(ended, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(LrkvError, match="run_dir") as error:
        train(ended.config(run=tmp_path / name), console=quiet(), **ONE)
    assert str(error.value).endswith("give another run_dir=PATH")


def test_a_state_or_a_first_step_without_memory_is_one_line(tiny, monkeypatch):
    """XLA's error is real: a petabyte."""
    with monkeypatch.context() as patched:
        patched.setattr("lrkv_jax.training.resume.initial_state", lambda *_: jnp.ones(1 << 48))
        with pytest.raises(LrkvError, match="^the state does not fit .* memory: use more devices"):
            train(tiny(), console=quiet(), **ONE)

    def call(state, batch):
        return state, {"loss": jnp.ones(1 << 48)}

    monkeypatch.setattr("lrkv_jax.training.loop.compiled_step", lambda *_: Compiled(call, 1, False))
    with pytest.raises(LrkvError, match="train.grad_accum_steps.* train.remat.*lrkv plan") as error:
        train(tiny(), console=quiet(), **ONE)
    assert error.value.exit_code == EXIT_BAD_INPUT
    with pytest.raises(jax.errors.JaxRuntimeError), _fitting(first=False):
        call(None, None)


def test_a_full_disk_is_one_line_that_leads_to_no_second_run(ended, tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("lrkv_jax.files.write", Mock(side_effect=full))
    with pytest.raises(LrkvError, match=r"run_dir = .* cannot be written \(No space left"):
        open_run(resolve(ended.config(run=tmp_path / "run")))
    with pytest.raises(LrkvError, match=r"\(No space left on device\): free space") as error:
        record_start(resolve(ended.config()), 6, [], Processes(), 1, "auto")
    assert error.value.exit_code == EXIT_UNAVAILABLE
