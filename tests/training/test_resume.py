"""A run resumes as the run it was: another setting or other data are refused, or recorded."""

import io
import json
import os
import shutil
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from lrkv_jax.config import load_config
from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.loader import make_loader
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.resume import changed_data
from lrkv_jax.training.run_dir import open_run, read_history, read_run
from lrkv_jax.training.state import resolve

ONE = {"devices": jax.devices()[:1]}


@pytest.fixture(scope="module")
def ended(finished_run):
    """The finished run's directory, and its configuration with other settings."""

    def config(*overrides, run=finished_run.directory):
        return load_config(finished_run.directory / "config.yaml", [f"run_dir={run}", *overrides])

    return SimpleNamespace(config=config, run=finished_run.directory)


@pytest.mark.parametrize(
    "change",
    [
        "attention=mha", "model.layers=1", "train.global_batch_size=4", "train.seed=9",
        "data.heldout=0.3", "optimizer.matrix_lr=0.5", "train.steps=5", "guard.skip_spikes=true",
    ],
)  # fmt: skip
def test_another_setting_that_changes_the_result_is_refused_with_its_values(ended, change):
    """REVIEW A2: batch, seed and optimizer were taken in silence, and config.yaml overwritten."""
    before = {path: path.read_bytes() for path in ended.run.glob("*.*")}
    key, _, value = change.partition("=")
    key = "model.attention" if "attention" in key else key
    with pytest.raises(LrkvError) as error:
        open_run(resolve(ended.config(change)))
    said = str(error.value)
    assert f" {key} = " in said and value.lower() in said.lower()
    assert said.endswith(f"--allow-change {key}") and "\n" not in said
    assert {path: path.read_bytes() for path in ended.run.glob("*.*")} == before


def test_an_allowed_change_is_taken_and_written_into_the_history(ended, tmp_path):
    run = shutil.copytree(ended.run, tmp_path / "[/b]x")  # which rich would read as markup (A21)
    other = ended.config(
        "train.global_batch_size=4", "train.steps=8", "train.max_checkpoints=3", run=run
    )
    with pytest.raises(LrkvError, match="train.global_batch_size = 8, and 4 is asked for"):
        train(other, console=Console(file=io.StringIO()), **ONE)
    console = Console(file=io.StringIO(), width=200)
    result = train(other, allow=["train.global_batch_size"], until=7, console=console, **ONE)
    assert result.step == 7 and len(read_metrics(run)) == 7
    assert "from step 6 on, train.global_batch_size is 4, not 8" in console.file.getvalue()
    assert read_run(run).train.global_batch_size == 4 and read_run(run).train.steps == 8
    rows = read_history(run)
    assert [(row["event"], row["step"]) for row in rows[:2]] == [("start", 0), ("start", 6)]
    assert {row["key"]: (row["step"], row["role"], row["old"], row["new"]) for row in rows[2:]} == {
        "train.global_batch_size": (6, "semantics", 8, 4),
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
    """REVIEW A3: only paths were compared, and the hash of the next batch was never read."""
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
        train(config, console=Console(file=io.StringIO()), **ONE)
    assert len(read_history(run)) == 1


@pytest.mark.parametrize(
    "name", ["file", "file/below", "x" * 300, "/proc/nothing/run", "/sys/run"], ids=lambda n: n[:9]
)
def test_a_directory_that_cannot_be_made_is_one_line(ended, tmp_path, name):
    """REVIEW A13: a file, below a file, too long and read-only ended in tracebacks."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LrkvError, match="run_dir") as error:
        train(ended.config(run=tmp_path / name), console=Console(file=io.StringIO()), **ONE)
    assert str(error.value).endswith("give another run_dir=PATH")


def test_a_full_disk_under_a_new_run_is_one_line(ended, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lrkv_jax.files.write", full)
    with pytest.raises(LrkvError, match=r"run_dir = .* cannot be written \(No space left"):
        open_run(resolve(ended.config(run=tmp_path / "run")))
