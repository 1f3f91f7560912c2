"""The notebook's cells run, on a tiny model, and what is kept of its outputs is small."""

import json
from pathlib import Path

import jax
import matplotlib
import pytest
from support.tiny import TINY

from lrkv_jax import load_config, train

NOTEBOOK = Path(__file__).parents[2] / "examples/heads.ipynb"


@pytest.mark.slow
def test_the_notebooks_cells_run(tmp_path, monkeypatch, pages, capsys):
    config = [*TINY, *pages, f"run_dir={tmp_path / 'runs/quickstart-lrkv_latent'}"]
    train(load_config("quickstart", config), devices=jax.devices()[:1])
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    names = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert "rank 4" in out and "The state of our union" in out


def test_the_notebook_was_run_and_is_small():
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert NOTEBOOK.stat().st_size < 100_000
