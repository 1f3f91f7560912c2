"""The interpreters that have torch and transformers, which need not be this one."""

import os
import subprocess
import sys

import pytest

_LACKS = """
import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if not find_spec(name)))
"""


def torch_pythons(*more):
    """The paths in LRKV_TORCH_PYTHON, with colons between them, or else this interpreter's.

    Skips where one lacks `more`, or where none is named and this one lacks torch or transformers;
    fails where one that is named lacks those.
    """
    named = os.environ.get("LRKV_TORCH_PYTHON")
    pythons = (named or sys.executable).split(os.pathsep)
    for python in pythons:
        command = [python, "-c", _LACKS, "torch", "transformers", *more]
        lacks = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        if lacks:
            line = f"{python} has no {' '.join(lacks)}: LRKV_TORCH_PYTHON names a Python with them"
            if named and {"torch", "transformers"} & set(lacks):
                pytest.fail(line, pytrace=False)
            pytest.skip(line)
    return pythons
