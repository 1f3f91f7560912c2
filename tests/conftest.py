"""Tests run on eight simulated CPU devices; the flag must be set before JAX starts."""

import fcntl
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from support.tiny import TINY, FinishedRun, few_pages, finish

MOST_PROGRAM_BYTES = 500_000_000  # of many states of the sources
MOST_MAPS = 45_000
PROGRAMS = pytest.StashKey[Path]()


def _add_xla_flag(flag):
    """Once, though workers inherit what the first process added: flags are part of JAX's keys."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags.split():
        os.environ["XLA_FLAGS"] = f"{flags} {flag}"


_add_xla_flag("--xla_force_host_platform_device_count=8")
# Programs go without the lines of Python that each operation came from, which no test reads: two
# pairs of runs of three rooms took 5 and 8 % fewer processor seconds.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# A program is found in about 5 ms, so most are worth keeping, however small.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.01")


def pytest_configure(config):
    """Share compiled programs among all tests, and compile them for a single run.

    Workers and subprocesses inherit the directory. It begins with the programs of this clone's last
    fast tests that passed, in pytest's cache (`pytest --cache-clear` forgets them): JAX's key has
    the program, its options, JAX's version and the processor's features.

    Programs that run once are compiled without LLVM's optimisations: 0.85 of the time in all. What
    XLA does with a program, its fusions, collectives and memory, stays the same. Tests that measure
    time keep the optimisations. Tests for a GPU take what JAX finds.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if config.getoption("markexpr") not in ("timed", "gpu"):
        _add_xla_flag("--xla_backend_optimization_level=0")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # a worker's, or the user's own
        return
    programs = Path(tempfile.mkdtemp(prefix="lrkv-tests-"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    config.stash[PROGRAMS] = programs
    warm = _can_keep(config) and config.getoption("markexpr") not in ("timed", "gpu")
    for kept in _kept_programs(config).iterdir() if warm else ():
        shutil.copyfile(kept, programs / kept.name)


@pytest.fixture(autouse=True, scope="module")
def _few_maps():
    """Forget this process's programs before Linux's limit on its mappings, 65,530, ends it.

    A program takes dozens of them, and the slow tests, in one process, more than there are: XLA
    then ended with a segmentation fault where it next wrote one.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()


def pytest_collection_finish():
    """Look for garbage more rarely: what was imported and collected stays to the end."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionfinish(session, exitstatus):
    """Keep fast tests' programs if they passed, and so killed nobody who was writing one."""
    programs = session.config.stash.get(PROGRAMS, None)
    if programs is None:
        return
    fast = session.config.getoption("markexpr").startswith("not ")
    if exitstatus == 0 and fast and _can_keep(session.config):
        kept = _kept_programs(session.config)
        if sum(file.stat().st_size for file in kept.iterdir()) > MOST_PROGRAM_BYTES:
            shutil.rmtree(kept)
            kept.mkdir()
        for program in programs.iterdir():
            if not (kept / program.name).exists():
                shutil.copyfile(program, kept / program.name)
    shutil.rmtree(programs, ignore_errors=True)


def _can_keep(config) -> bool:
    return hasattr(config, "cache") and os.access(config.rootpath, os.W_OK)


def _kept_programs(config) -> Path:
    return config.cache.mkdir("programs")


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
def one_device(monkeypatch):
    """Runs that name no mesh train and are loaded on one device, by smaller programs."""
    import jax

    from lrkv_jax.config import MeshConfig
    from lrkv_jax.distributed.mesh import make_mesh
    from lrkv_jax.training import restore, setup

    def made(mesh, devices=None):
        return make_mesh(mesh, jax.devices()[:1] if mesh == MeshConfig() else devices)

    for room in (restore, setup):
        monkeypatch.setattr(room, "make_mesh", made)


@pytest.fixture
def loaded_on_one_device(monkeypatch):
    """Runs are loaded, and models imported, on one device, whatever their meshes."""
    import jax

    from lrkv_jax.distributed.mesh import make_mesh
    from lrkv_jax.interop import importing
    from lrkv_jax.training import restore

    for room in (restore, importing):
        monkeypatch.setattr(room, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))


@pytest.fixture
def tiny(tmp_path, pages):
    """A function (*overrides) → the quickstart run, shrunk to seconds, in its own directory."""
    from lrkv_jax.config import load_config

    def config(*overrides: str):
        places = (*pages, f"run_dir={tmp_path / 'run'}")
        return load_config("configs/quickstart.yaml", [*TINY, *places, *overrides])

    return config
