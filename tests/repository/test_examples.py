"""The examples run: the two files, and the notebook on a tiny model."""

import json
import runpy
from pathlib import Path

import jax
import matplotlib
import pytest
from support.tiny import TINY

from lrkv_jax import load_config, train

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "heads.ipynb"


def test_the_layer_in_a_hundred_lines_checks_itself_and_needs_nothing_of_ours(capsys):
    file = EXAMPLES / "lrkv_in_100_lines.py"
    assert len(file.read_text().splitlines()) <= 100 and "import lrkv_jax" not in file.read_text()
    runpy.run_path(str(file), run_name="__main__")
    assert "decoded exactly, from 80 values" in capsys.readouterr().out


@pytest.mark.slow
def test_the_layer_learns_in_a_plain_transformer():
    assert runpy.run_path(str(EXAMPLES / "in_your_model.py"))["main"]() > 0.9


@pytest.mark.slow
def test_the_notebook_was_run_and_runs(tmp_path, monkeypatch, pages, capsys):
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells) and NOTEBOOK.stat().st_size < 100_000
    config = [*TINY, *pages, f"run_dir={tmp_path / 'runs/quickstart-lrkv_latent'}"]
    train(load_config("quickstart", config), devices=jax.devices()[:1])
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert "rank 4" in out and "The state of our union" in out
