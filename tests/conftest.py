"""Tests run on eight simulated CPU devices; the flag must be set before JAX starts."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from support.tiny import TINY, FinishedRun, few_pages, finish

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs go without the lines of Python that each operation came from, which no test reads: two
# pairs of runs of three rooms took 5 and 8 % fewer processor seconds.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Workers and subprocesses inherit this: a program that several tests need is compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="lrkv-tests-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def pytest_configure(config):
    """Programs that run once are compiled without LLVM's optimisations: 0.85 of the time in all.

    What XLA does with a program, its fusions, collectives and memory, stays the same. Slow tests
    run theirs often, or measure them.
    """
    if config.getoption("markexpr") not in ("slow", "timed"):
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory) -> Path:
    """Where this worker's tests build the embedded corpus, once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> tuple[str, ...]:
    """Settings of a run on a few pages of text, built once by this worker."""
    return few_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> FinishedRun:
    """A tiny run, trained once and shared by all workers: read it, or copy its directory."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "finished-run"
    with open(base / "finished-run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return finish(folder)


@pytest.fixture
def tiny(tmp_path, pages):
    """A function (*overrides) → the quickstart run, shrunk to seconds, in its own directory."""
    from lrkv_jax.config import load_config

    def config(*overrides: str):
        places = (*pages, f"run_dir={tmp_path / 'run'}")
        return load_config("configs/quickstart.yaml", [*TINY, *places, *overrides])

    return config
