"""Imports run one way, kernels know jax alone, and the core loads without the data libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lrkv_jax

PACKAGE = Path(lrkv_jax.__file__).parent
# Each room may import those of the rows above it, and its own.
FLOORS = [
    {"errors", "disk"},
    {"config", "hardware", "runtime"},
    {"accounting", "sharding", "kernels"},
    {"nn"},
    {"attention"},
    {"model"},
    {"optim", "data", "checkpoint"},
    {"decode"},
    {"train"},
    {"evals"},
    {"comparison"},
    {"artefacts"},
    {"bench", "plan", "chat", "generation"},
    {"quickstart"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> set[str]:
    """Dotted names of the package's modules that a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module)
    return names


def own(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts)


@pytest.mark.parametrize("path", MODULES, ids=[own(p) for p in MODULES])
def test_a_module_imports_only_from_the_floors_below(path):
    here = room_of(own(path))
    for name in imported(path):
        if name.startswith("lrkv_jax."):
            there = room_of(name)
            below = FLOOR[there] < FLOOR[here] or there == here
            assert below, f"{own(path)} imports {name}, which stands on a higher floor"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=own)
def test_kernels_import_jax_alone(path):
    allowed = {"jax", "lrkv_jax.kernels", "lrkv_jax.errors"} | sys.stdlib_module_names
    for name in imported(path):
        known = name in allowed or name.startswith(("jax.", "lrkv_jax.kernels."))
        assert known, f"{path.name} imports {name}"


def test_no_module_is_longer_than_its_reason():
    long = {own(p): n for p in MODULES if (n := len(p.read_text().splitlines())) > 310}
    assert not long


def test_the_core_loads_without_grain_or_tfds():
    code = """
import sys
for absent in ("grain", "tensorflow_datasets", "tensorflow", "tensorboardX", "pyarrow"):
    sys.modules[absent] = None  # an import of it now fails
import lrkv_jax.model, lrkv_jax.decode, lrkv_jax.optim, lrkv_jax.sharding
import lrkv_jax.attention.grouped, lrkv_jax.attention.mla, lrkv_jax.attention.lrkv
from lrkv_jax import Transformer, ModelConfig, generate
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in lrkv_jax.__all__:
        assert getattr(lrkv_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lrkv_jax.nothing  # noqa: B018
