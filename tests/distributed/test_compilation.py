"""Programs are compiled once, ahead of time, and kept where only their user can write."""

import errno
import os
import resource
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lrkv_jax.distributed import compilation
from lrkv_jax.distributed.compilation import BETWEEN_GPUS, compile_ahead, use_cache, xla_options
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError

SETTINGS = (
    "jax_compilation_cache_dir", "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)  # fmt: skip


@pytest.fixture
def settings(monkeypatch):
    """JAX's settings, as they were; nothing chosen by the environment."""
    monkeypatch.delenv("LRKV_COMPILATION_CACHE", raising=False)
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def test_the_cache_is_the_users_and_private_or_elsewhere_or_off(
    settings, monkeypatch, tmp_path, capsys
):
    """A volume of Kubernetes with fsGroup has mode 770: the run goes on without it."""
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = use_cache(Processes())
    assert directory == tmp_path / "lrkv_jax" / "compiled"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(directory)
    monkeypatch.setenv("LRKV_COMPILATION_CACHE", str(tmp_path / "mine"))
    assert use_cache(Processes()) == tmp_path / "mine"
    for mode in (0o770, 0o707):
        (tmp_path / "mine").chmod(mode)
        jax.config.update("jax_enable_compilation_cache", True)
        assert use_cache(Processes()) is None and not jax.config.jax_enable_compilation_cache
        said = capsys.readouterr().err
        assert f"{tmp_path}/mine can be written by others" in said and said.count("\n") == 1
    (tmp_path / "mine").chmod(0o700)
    with monkeypatch.context() as patch:  # a full disk, in the first of two processes
        first = Processes()
        first.count, first.index, first.exchange = 2, 0, lambda value: [value, value]
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(compilation.tempfile, "TemporaryFile", Mock(side_effect=full))
        assert use_cache(first) is None and not jax.config.jax_enable_compilation_cache
        said = capsys.readouterr().err
        assert "mine cannot be written (No space left on device)" in said and said.count("\n") == 1
    monkeypatch.setenv("LRKV_COMPILATION_CACHE", "off")
    assert use_cache(Processes()) is None and not jax.config.jax_enable_compilation_cache


def test_a_program_compiled_ahead_is_traced_once_and_consumes_its_arguments(settings, mesh):
    # The session's programs are kept, and the next would find this one where it took long.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    traced = []
    split = NamedSharding(mesh, PartitionSpec("x"))

    def step(x, y):
        traced.append(1)
        return x + 2 * y.sum(), {"mean": x.mean()}

    jitted = jax.jit(
        step, donate_argnums=0, in_shardings=(split, split), out_shardings=(split, None)
    )
    shape = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=split)
    compiled = compile_ahead(jitted, shape, shape, mesh=mesh)
    assert compiled.seconds > 0 and compiled.cached is False
    after, y = (jax.device_put(jnp.arange(16.0), split) for _ in range(2))
    for _ in range(3):
        before = after
        after, _ = compiled.call(before, y)
        assert before.is_deleted() and not y.is_deleted()
    assert len(traced) == 1
    assert float(after[1]) == 1 + 3 * 240 and after.sharding == split


def test_an_option_that_this_xla_does_not_know_is_one_line(mesh, monkeypatch):
    monkeypatch.setattr(compilation, "xla_options", lambda mesh: {"xla_gpu_no_such_option": True})
    with pytest.raises(LrkvError, match="xla_gpu_no_such_option.*LRKV_XLA_FLAGS=off") as error:
        compile_ahead(jax.jit(lambda x: x), jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh)
    assert "\n" not in str(error.value)
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    program.compile(compiler_options=BETWEEN_GPUS)  # it does know these


def test_without_a_home_directory_programs_are_not_kept(settings, monkeypatch, capsys):
    """A container with any uid, and no HOME or entry in passwd."""
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    assert use_cache(Processes()) is None and not jax.config.jax_enable_compilation_cache
    said = capsys.readouterr().err
    assert said.startswith("lrkv: compiled programs are not cached: ") and said.count("\n") == 1
    assert "LRKV_COMPILATION_CACHE" in said


def mesh_of(platform, count):
    """What `xla_options` reads of a mesh."""
    devices = np.array([SimpleNamespace(platform=platform)] * count)
    return SimpleNamespace(size=count, devices=devices)


def test_options_are_for_programs_between_gpus_and_can_be_turned_off(monkeypatch):
    assert xla_options(mesh_of("gpu", 8)) == BETWEEN_GPUS
    assert xla_options(mesh_of("gpu", 1)) == {} and xla_options(mesh_of("cpu", 8)) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp/x --{next(iter(BETWEEN_GPUS))}=off")
    assert xla_options(mesh_of("gpu", 8)) == {}
    monkeypatch.setenv("LRKV_XLA_FLAGS", "off")
    assert xla_options(mesh_of("gpu", 8)) == {}
    monkeypatch.setenv("LRKV_XLA_FLAGS", "0")
    with pytest.raises(LrkvError, match="LRKV_XLA_FLAGS = 0: use on or off"):
        xla_options(mesh_of("gpu", 8))


def test_memory_is_taken_unless_the_user_says_how_much():
    """JAX refuses its two names for it together."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        compilation.take_memory(told := {name: "0.5"})
        assert told == {name: "0.5"}
    compilation.take_memory(untold := {})
    assert untold == {"XLA_CLIENT_MEM_FRACTION": compilation.MEMORY_FRACTION}


def test_a_process_on_a_cpu_keeps_the_memory_that_its_programs_work_in():
    """Counted by the system: a page that was given back faults when it is taken again."""
    code = """if 1:
        import resource
        from lrkv_jax.distributed import start
        start()
        import jax, jax.numpy as jnp
        power = jax.jit(lambda x: (jnp.sin(x @ x) @ x).sum())
        x = jnp.ones((2048, 2048))
        def faults():
            jax.block_until_ready([power(x) for _ in range(4)])
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        counts = [faults() for _ in range(5)]
        print(min(after - before for before, after in zip(counts, counts[1:])))
        """
    pages = 4 * 2048**2 * 4 // resource.getpagesize()  # of one array a call, in four calls

    def faults_of(**how):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | how
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=-1, check=True)
        return int(done.stdout)

    assert faults_of() < 0.05 * pages
    assert faults_of(MALLOC_TOP_PAD_="131072") > 0.9 * pages  # the user's word
