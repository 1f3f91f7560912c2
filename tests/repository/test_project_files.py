"""pyproject, constraints, Dockerfile and the workflow say what the code and .ci/run need."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import lrkv_jax

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE = Path(lrkv_jax.__file__).parent


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_every_library_that_the_package_imports_is_declared_and_pinned():
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(r for name in extras for r in extras[name])]
    declared = {name_of(requirement) for requirement in wanted}
    installed = packages_distributions()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        imported = re.findall(r"^ *(?:import|from) (\w+)(?:[. ].*)?$", text, re.M)
        for top in set(imported) - {"lrkv_jax", *sys.stdlib_module_names}:
            if (path.parent / f"{top}.py").exists():  # the sandbox's script imports so
                continue
            homes = {name_of(n) for n in installed.get(top, [top])}
            assert homes & declared, f"{path.name} imports {top}, which pyproject lacks"
    tested = [requirement for name in ("dev", "serve", "beam") for requirement in extras[name]]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    pinned = {name_of(PROJECT["name"]), *map(name_of, pinned)}  # an extra may have another
    assert {name_of(one) for one in [*PROJECT["dependencies"], *tested]} <= pinned


@pytest.mark.beam
@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_every_extra_resolves_under_the_constraints(extra):
    """In the stage `beam`, whose pip reads the metadata of a wheel alone, not its 500 MB."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--use-feature=fast-deps"]
    command += ["--quiet", "-c", "constraints.txt", "-e", f".[{extra}]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_stages_are_those_of_the_ci_script_everywhere():
    script = (ROOT / ".ci/run").read_text()
    stages = re.search(r"^known=\((.*)\)$", script, re.M)[1].split()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["stage"]["strategy"]["matrix"]["stage"] == stages
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == stages


def test_the_image_and_the_citation_are_of_what_is_there():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{word}" in ignored for word in copied)
    (extra,) = re.findall(r"^ARG CUDA=(\w+)$", "\n".join(lines), re.M)
    assert extra in PROJECT["optional-dependencies"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lrkv_jax.__version__
    assert citation["license"] == PROJECT["license"]
