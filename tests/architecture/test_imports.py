"""Imports run one way, kernels know jax alone, and models load without the data libraries."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import lrkv_jax

PACKAGE = Path(lrkv_jax.__file__).parent
# Each room may import those of the rows above it, and its own.
FLOORS = [
    {"errors"},
    {"disk"},
    {"config", "hardware", "runtime"},
    {"accounting", "sharding", "kernels"},
    {"nn"},
    {"attention"},
    {"model"},
    {"optim", "data", "checkpoint"},
    {"decode", "train"},
    {"run"},
    {"interop"},
    {"evals", "analysis"},
    {"comparison"},
    {"artefacts"},
    {"chat", "generation", "serve"},
    {"bench", "plan", "sweep"},
    {"quickstart", "paper", "doctor"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, at any depth of its code, for types too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if is_file(name) else node.module for name in whole}
    return names


def is_file(module: str) -> bool:
    return PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").is_file()


def own(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts)


def test_modules_import_only_from_the_floors_below():
    up = []
    for path in MODULES:
        here = room_of(own(path))
        for name in imported(path):
            if name.startswith("lrkv_jax."):
                there = room_of(name)
                if there != here and FLOOR[there] >= FLOOR[here]:
                    up.append(f"{own(path)} imports {name}, which stands on a higher floor")
    assert not up


def test_the_first_page_draws_these_floors():
    page = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    drawn = page.split("## A map of the package")[1].split("```")[1].strip().splitlines()
    rows = [set(line[:34].split()) for line in drawn]
    assert rows == FLOORS[-2::-1]  # from the top, without the entry of `python -m`


def test_no_files_import_each_other_in_a_circle():
    files = {own(path).removesuffix(".__init__"): imported(path) for path in MODULES}
    graph = {name: names & files.keys() for name, names in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is one


def test_kernels_import_jax_alone():
    allowed = {"jax", "numpy", "lrkv_jax.kernels", "lrkv_jax.errors"}  # NumPy comes with JAX
    allowed |= sys.stdlib_module_names
    for path in (PACKAGE / "kernels").rglob("*.py"):
        for name in imported(path):
            known = name in allowed or name.startswith(("jax.", "lrkv_jax.kernels."))
            assert known, f"{path.name} imports {name}"


def test_no_module_is_longer_than_its_reason():
    long = {own(p): n for p in MODULES if (n := len(p.read_text().splitlines())) > 600}
    assert not long


def test_the_core_and_the_benchmarks_load_without_grain_or_tfds():
    code = """
import sys
for absent in ("grain", "tensorflow_datasets", "tensorflow", "tensorboardX", "pyarrow"):
    sys.modules[absent] = None  # an import of it now fails
import lrkv_jax.models.transformer, lrkv_jax.inference, lrkv_jax.optim, lrkv_jax.distributed
import lrkv_jax.models.attention.grouped, lrkv_jax.models.attention.mla, lrkv_jax.models.attention.lrkv
from lrkv_jax import Transformer, ModelConfig, generate
from lrkv_jax.lab.bench import train, train_table
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_whatever_was_imported_before():
    import lrkv_jax.training.state  # noqa: F401  # a room that has a public function's name

    for name in set(lrkv_jax.__all__) - {"__version__"}:
        assert callable(getattr(lrkv_jax, name)), name
    assert set(lrkv_jax.__all__) <= set(dir(lrkv_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lrkv_jax.nothing  # noqa: B018


@pytest.mark.parametrize("first", ["lrkv_jax.training.step", "lrkv_jax.training.loop", "lrkv_jax"])
def test_the_package_that_has_a_public_function_s_name_is_both(first):
    code = f"""
import {first}
import lrkv_jax.training.step as step
from lrkv_jax import train
import inspect, lrkv_jax, lrkv_jax.training.loop
assert callable(step.make_train_step) and lrkv_jax.train is train
assert inspect.signature(train) == inspect.signature(lrkv_jax.training.loop.train)
try:
    train(None, devices=())
except AttributeError as error:
    assert "NoneType" in str(error)
else:
    raise SystemExit("it did not train")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
