"""A trained run answers from Python: logits of ids and of text, and text."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lrkv_jax.config import load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.training import restore
from lrkv_jax.training.checkpointing import layout

TEXT = "Mr. Speaker"  # after it one token is much the likeliest


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_on_one_device")  # as it was trained: its programs are training's
def test_the_first_page_s_run_says_text_and_logits_of_text_and_of_ids(
    finished_run, tmp_path, monkeypatch, capsys
):
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/quickstart-lrkv_latent").symlink_to(finished_run.directory)
    monkeypatch.chdir(tmp_path)
    exec(source, names := {})
    run = names["run"]
    assert len(capsys.readouterr().out) > 20
    ids = [run.tokenizer.bos, *run.tokenizer.encode(TEXT).tolist()]
    logits_TV = np.asarray(run.logits(TEXT))
    assert logits_TV.shape == (len(ids), run.config.model.vocabulary)
    assert logits_TV.dtype == np.float32
    np.testing.assert_array_equal(run.model(ids), logits_TV)
    with pytest.raises(LrkvError, match="ids has the token id 4096"):
        run.model([[0, 4096]])
    with pytest.raises(LrkvError, match="ids holds float64 values"):
        run.model([0.5])


def test_the_best_of_steps_that_were_not_validated_is_refused(finished_run, tmp_path):
    folder = shutil.copytree(finished_run.directory, tmp_path / "run")
    (step,) = (folder / "checkpoints").iterdir()
    content = layout.read_manifest(step)
    layout.write_manifest(step, {**content, "validation_loss": None})
    with pytest.raises(LrkvError, match="was validated: name one"):
        restore.load_run(folder, step="best")


def test_auto_is_what_suits_this_machine_whatever_trained_the_run(finished_run, tmp_path):
    """A GPU's run says bfloat16 and that auto was asked for: a CPU reads it in float32."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run.directory, folder)
    config, history = folder / "config.yaml", folder / "history.jsonl"
    auto = '"dtype": "float32", "asked_dtype": "auto"'
    assert auto in history.read_text()

    def next_run():
        found = load_config("quickstart_midtrain", [f"init_from={folder}"])
        return found.model.dtype, found.optimizer.muon.dtype

    assert next_run() == ("auto", "auto")
    config.write_text(config.read_text().replace("dtype: float32", "dtype: bfloat16", 1))
    assert next_run() == ("auto", "float32")  # which then was asked for
    for overrides in ([], {"model": {"kv_cache_dtype": "int8"}}):
        assert restore.load_run(folder, overrides=overrides).config.model.dtype == "float32"
    text = "model.dtype=bfloat16"
    for overrides in ([text], text, {"model.dtype": "bfloat16"}, {"model": {"dtype": "bfloat16"}}):
        assert restore.load_run(folder, overrides=overrides).config.model.dtype == "bfloat16"
    history.write_text(history.read_text().replace(auto, auto.replace("auto", "bfloat16")))
    assert restore.load_run(folder).config.model.dtype == "bfloat16"
    assert next_run() == ("bfloat16", "float32")
