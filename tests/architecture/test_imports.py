"""Imports run one way, and models load without the data libraries."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import lrkv_jax

PACKAGE = Path(lrkv_jax.__file__).parent
# Each package may import those of the rows above it. README prints this table from its end.
LAYERS = [
    {"errors"},
    {"files"},
    {"config", "kernels"},
    {"distributed"},
    {"models"},
    {"optim", "data"},
    {"inference"},
    {"training"},
    {"interop", "serving", "evaluation"},
    {"lab"},
    {"cli"},
]
HEIGHT = {package: height for height, packages in enumerate(LAYERS) for package in packages}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def package_of(module: str) -> str:
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


def test_modules_import_only_from_packages_below():
    """So the core never imports the lab, which stands above all of it."""
    up = []
    for path in MODULES:
        here = package_of(own(path))
        for name in imported(path):
            if name.startswith("lrkv_jax."):
                there = package_of(name)
                if there != here and HEIGHT[there] >= HEIGHT[here]:
                    up.append(f"{own(path)} imports {name}, which is no package below")
    assert not up


def test_the_first_page_draws_these_layers():
    page = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    drawn = page.split("## A map of the package")[1].split("```")[1].strip().splitlines()
    rows = [set(line[:34].split()) for line in drawn]
    assert rows == LAYERS[::-1]


def test_no_files_import_each_other_in_a_circle():
    files = {own(path).removesuffix(".__init__"): imported(path) for path in MODULES}
    graph = {name: names & files.keys() for name, names in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is one


def test_no_module_is_longer_than_its_reason():
    long = {own(p): n for p in MODULES if (n := len(p.read_text().splitlines())) > 600}
    assert not long


def test_the_core_and_the_benchmarks_load_without_grain_or_tfds():
    code = """
import sys, time
began = time.process_time()
import lrkv_jax
assert time.process_time() - began < 0.15 and "numpy" not in sys.modules
for absent in ("grain", "tensorflow_datasets", "tensorflow", "tensorboardX", "pyarrow"):
    sys.modules[absent] = None  # an import of it now fails
import lrkv_jax.models.transformer, lrkv_jax.inference, lrkv_jax.optim
from lrkv_jax.models.attention import grouped, lrkv, mla
from lrkv_jax import Transformer, ModelConfig, Engine
from lrkv_jax.lab.bench import train
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in set(lrkv_jax.__all__) - {"__version__"}:
        assert callable(getattr(lrkv_jax, name)), name
    assert set(lrkv_jax.__all__) <= set(dir(lrkv_jax))
    for guess, answer in (("loadrun", "did you mean load_run"), ("GPT", "use Transformer")):
        with pytest.raises(AttributeError, match=f"has no name {guess}: {answer}"):
            getattr(lrkv_jax, guess)
