"""Programs are compiled once, ahead of time, and kept where only their user can write."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lrkv_jax.distributed import xla
from lrkv_jax.distributed.compilation import Compiling, compile_ahead, use_cache
from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


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


def test_the_cache_is_the_users_own_and_private(settings, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = use_cache(Processes())
    assert directory == tmp_path / "lrkv_jax" / "compiled"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(directory)
    assert use_cache(Processes()) == directory


def test_the_cache_can_be_elsewhere_or_off(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("LRKV_COMPILATION_CACHE", str(tmp_path / "mine"))
    assert use_cache(Processes()) == tmp_path / "mine"
    monkeypatch.setenv("LRKV_COMPILATION_CACHE", "off")
    assert use_cache(Processes()) is None and not jax.config.jax_enable_compilation_cache


def test_jaxs_own_variable_is_left_as_it_is(settings):
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen and str(use_cache(Processes())) == chosen


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_is_refused(settings, monkeypatch, tmp_path, mode):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    monkeypatch.setenv("LRKV_COMPILATION_CACHE", str(shared))
    with pytest.raises(LrkvError, match="can be written by others") as error:
        use_cache(Processes())
    assert str(shared) in str(error.value) and "\n" not in str(error.value)


def test_a_directory_that_cannot_be_made_is_named(settings, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LRKV_COMPILATION_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LrkvError, match="cannot be made"):
        use_cache(Processes())


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
    x, y = (jax.device_put(jnp.arange(16.0), split) for _ in range(2))
    after = x
    for _ in range(3):
        before = after
        after, metrics = compiled.call(before, y)
        assert before.is_deleted() and not y.is_deleted()
    assert len(traced) == 1
    assert float(after[1]) == 1 + 3 * 240 and after.sharding == split


def test_the_mesh_and_the_thread_change_nothing(mesh):
    def where(x):
        assert not jax.sharding.get_abstract_mesh().empty
        return jax.lax.with_sharding_constraint(x, PartitionSpec("x")) * 2

    with Compiling(jax.jit(where), jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh) as compiling:
        pass
    assert compiling.result().call(jnp.ones(8)).tolist() == [2.0] * 8


def test_what_compiling_raises_is_raised_where_the_program_is_asked_for(mesh):
    def broken(x):
        raise ValueError("cannot be traced")

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    with (
        pytest.raises(ValueError, match="cannot be traced"),
        Compiling(jax.jit(broken), shape, mesh=mesh) as compiling,
    ):
        compiling.result()


def test_an_option_that_this_xla_does_not_know_is_one_line(mesh, monkeypatch):
    monkeypatch.setattr(xla, "options", lambda mesh: {"xla_gpu_no_such_option": True})
    with pytest.raises(LrkvError, match="xla_gpu_no_such_option.*LRKV_XLA_FLAGS=off") as error:
        compile_ahead(jax.jit(lambda x: x), jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("home", ["none", "a file"])
def test_without_a_home_directory_programs_are_not_kept_and_everything_runs(
    settings, monkeypatch, tmp_path, capsys, home
):
    """A12: a container with any uid, and no HOME or entry in passwd."""

    def unknown(uid):
        raise KeyError(uid)

    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    if home == "a file":
        (tmp_path / "home").write_text("")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert use_cache(Processes()) is None and not jax.config.jax_enable_compilation_cache
    said = capsys.readouterr().err
    assert said.startswith("lrkv: compiled programs are not kept: ") and said.count("\n") == 1
    assert "LRKV_COMPILATION_CACHE" in said


PROGRAM = """
import hashlib
import jax, jax.numpy as jnp
from jax.sharding import AxisType
from lrkv_jax.distributed.compilation import compile_ahead, use_cache
from lrkv_jax.distributed.processes import Processes
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
use_cache(Processes())
mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
grad = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w @ w) ** 3)))
shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
compiled = compile_ahead(grad, shape, shape, mesh=mesh)
w = jax.random.normal(jax.random.key(0), (64, 64))
for _ in range(5):
    w = w - 0.01 * compiled.call(w, w.T)
print(compiled.cached, hashlib.sha256(jax.device_get(w).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_the_next_process_finds_the_program_and_computes_the_same_bits(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_PERSISTENT")}
    environment |= {
        "LRKV_COMPILATION_CACHE": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    first, second = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    )
    assert (first[0], second[0]) == ("False", "True")
    assert first[1] == second[1] and len(first[1]) == 64


# More than XLA's two minutes on two cores, and minutes less than the limit.
SLOW_TO_COMPILE = """
import lrkv_jax.cli as cli
def app():
    import jax, jax.numpy as jnp
    def f(x):
        for i in range(1500):
            x = jnp.sort(jnp.sin(x * i) @ x, axis=i % 2) + jnp.cumsum(x, axis=0)
        return x
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(f).lower(jnp.ones((40, 40))).compile()
    print("compiled")
cli.app = app
cli.main()
"""


@pytest.mark.nights
def test_a_compilation_of_minutes_shows_no_alarm_of_xla():
    """A19: asterisks on stderr after two minutes, in the middle of a bar."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-c", SLOW_TO_COMPILE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "compiled\n", "")
