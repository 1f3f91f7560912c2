"""The kernel compiled for GPUs that are not here. None has run it."""

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
