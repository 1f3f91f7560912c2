"""experiments/peers.py, with a Python that has torch and transformers: LRKV_TORCH_PYTHON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.planted_models import LLAMA, plant
from support.torch_python import torch_pythons

from lrkv_jax.interop.export import export

PROGRAM = Path(__file__).parents[3] / "experiments/peers.py"
TRAINERS = ("torch eager", "torch compiled")
DECODERS = [
    "lrkv_jax", "products alone", "transformers, dynamic", "transformers, static", "plain JAX",
]  # fmt: skip
SHAPE = ("model.layers=1", "model.unroll=1", "model.width=32", "train.seq_len=16")
HOW = ("--only=quickstart/lrkv", "--rounds=3", "--prompt=8", "--new=6")
# One device, and nothing is compiled well: that takes minutes, and PyTorch a C++ compiler.
ALONE = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.torch
def test_peers_are_timed_in_turn_and_another_model_is_named(tmp_path):
    plant(tmp_path / "run", "attention=gqa", *LLAMA)
    export(tmp_path / "run", tmp_path / "folder")
    (python, *_) = torch_pythons()
    own = f"--folder={tmp_path}/folder", f"--run={tmp_path}/run", f"--out={tmp_path}"
    given = f"--torch={python}", f"--transformers={python}", *own

    def peers(*changes):
        command = [sys.executable, PROGRAM, *SHAPE, *changes, *HOW, *given]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | ALONE)

    done = peers()
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "peers_cpu.json").read_text())["rows"]
    trainers = [name + how for name in TRAINERS for how in ("", ", memory kept")]
    ours = ["lrkv_jax", "lrkv_jax, mha", "products alone"]
    assert [row["peer"] for row in rows] == [*ours, *trainers, *DECODERS * 4]
    for row in rows:
        median, low, high = row["prompt tokens/s" if row["part"] == "decoding" else "tokens/s"]
        assert 0 < low <= median <= high and f"| {row['of']} " in done.stdout
    done = peers("model.activation=gelu")
    assert done.returncode == 1 and "torch eager: loss differs by " in done.stderr
    assert done.stderr.endswith("it is another model\n")
