"""The examples run: the two files, as an installed wheel has them, and the notebook."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import matplotlib
import pytest
from support.tiny import TINY

from lrkv_jax import load_config, train

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "heads.ipynb"
ENV = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}


def test_the_layer_in_a_hundred_lines_checks_itself_and_needs_nothing_of_ours(capsys):
    file = EXAMPLES / "lrkv_in_100_lines.py"
    assert len(file.read_text().splitlines()) <= 100 and "import lrkv_jax" not in file.read_text()
    runpy.run_path(str(file), run_name="__main__")
    assert "decoded exactly, from 80 values" in capsys.readouterr().out


@pytest.mark.slow
def test_the_wheel_alone_runs_the_quickstart_a_report_and_the_examples(tmp_path):
    """In an empty environment: no extra, and no checkout on the path."""

    def run(*command):
        command = list(map(str, command))
        done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    bin, (wheel,) = tmp_path / "empty/bin", tmp_path.glob("*.whl")
    # Of 8,000 modules Python compiles those that are imported.
    run(bin / "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    small = ["train.steps=4", "train.seq_len=128", "model.layers=1", "model.unroll=1"]
    printed = run(bin / "lrkv", "quickstart", *small)
    assert "lrkv_latent, decoded from its cache" in printed
    run(bin / "lrkv", "report", "runs", "--out", "out")
    assert "quickstart-mha" in (tmp_path / "out/report.html").read_text()
    assert "decoded exactly" in run(bin / "python", EXAMPLES / "lrkv_in_100_lines.py")
    learned = run(bin / "python", EXAMPLES / "in_your_model.py")
    assert int(re.search(r"(\d+)% of the decoded tokens are right", learned)[1]) > 90


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
