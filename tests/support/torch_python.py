"""The interpreter that has torch and transformers, which need not be this one."""

import os
import subprocess
import sys

import pytest

_LACKS = """
import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if not find_spec(name)))
"""


def torch_python(*more):
    """Its path, from LRKV_TORCH_PYTHON or this one; skips where it lacks them or `more`."""
    python = os.environ.get("LRKV_TORCH_PYTHON", sys.executable)
    command = [python, "-c", _LACKS, "torch", "transformers", *more]
    lacks = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if lacks:
        pytest.skip(f"{python} has no {lacks}: LRKV_TORCH_PYTHON names a Python with them")
    return python
