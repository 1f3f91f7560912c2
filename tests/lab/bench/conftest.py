"""Scripts of experiments/ as modules."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture
def experiment():
    """A function (name) → the module of experiments/NAME.py."""

    def load(name):
        path = Path(__file__).parents[3] / "experiments" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        return module

    return load
