"""experiments/growth.py at the two smallest sizes of every sweep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "experiments/growth.py"
TINY = ("model.layers=1", "model.unroll=1", "--points=2")


@pytest.mark.slow
def test_every_sweep_has_its_points_its_exponents_and_a_panel(tmp_path):
    flags = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, PROGRAM, *TINY, f"--out={tmp_path}"]
    done = subprocess.run(command, env=flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    points = json.loads((tmp_path / "growth.json").read_text())["points"]
    assert len(points) == 5 * 3 * 2 + 2 * 2 and all(point["ms"] > 0 for point in points)
    # Attention's cache is twice as large at twice the length.
    assert done.stdout.count("1.00 (1.00) | 1.00 (1.00) |") == 2
    assert (tmp_path / "growth.png").stat().st_size > 10_000
