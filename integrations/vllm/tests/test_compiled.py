"""The kernel compiled for GPUs that are not here, and the program that measures it on one."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_kernel_compiles_for_three_generations_of_gpus():
    """Without spills to speak of, and within each one's shared memory."""
    script = Path(__file__).parent / "compile_kernel.py"
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, script], check=True, capture_output=True, env=plain)
    found = json.loads(out.stdout)
    assert len(found) == 4
    for name, targets in found.items():
        assert targets.keys() == {"sm_80", "sm_90", "sm_100"}
        for target, usage in targets.items():
            assert usage["LOCAL"] == 0 and usage["STACK"] <= 128, (name, target, usage)
            assert usage["shared"] <= 160_000, (name, target, usage)


def test_the_program_that_measures_it_runs_here_without_times(tmp_path):
    script, out = Path(__file__).parents[1] / "bench_kernel.py", tmp_path / "found.json"
    small = ("--batch", "2", "--length", "100", "--shapes", "1")
    subprocess.run([sys.executable, script, "--out", out, *small], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert all(row["taken"] and row["kernel_ulp"] < 25 for row in found["compared"])
    (row,) = found["timed"]
    assert row["error"] < 1e-5 and row["us"] is None
