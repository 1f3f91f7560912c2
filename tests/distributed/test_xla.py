"""XLA's options: between GPUs only, the user's own first, and all of them known to this XLA."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.distributed.xla import BETWEEN_GPUS, MEMORY_FRACTION, options, take_memory
from lrkv_jax.errors import LrkvError

GATHER = "xla_gpu_pipeline_all_gather"


def mesh(platform, count):
    """What `options` looks at of a mesh."""
    devices = np.array([SimpleNamespace(platform=platform)] * count)
    return SimpleNamespace(size=count, devices=devices)


def test_they_are_for_programs_that_cross_gpus():
    assert options(mesh("gpu", 8)) == BETWEEN_GPUS
    assert options(mesh("gpu", 1)) == {} and options(mesh("cpu", 8)) == {}


@pytest.mark.parametrize(
    "flags", [f"--{GATHER}=off", f"--xla_dump_to=/tmp/x --xla_gpu_enable_pipelined_{GATHER[17:]}=0"]
)
def test_what_the_user_says_in_xla_flags_is_left_to_the_user(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert GATHER not in options(mesh("gpu", 8))


def test_they_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("LRKV_XLA_FLAGS", "off")
    assert options(mesh("gpu", 8)) == {}
    monkeypatch.setenv("LRKV_XLA_FLAGS", "0")
    with pytest.raises(LrkvError, match="LRKV_XLA_FLAGS = 0: use on or off"):
        options(mesh("gpu", 8))


def test_this_xla_knows_them_all():
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    program.compile(compiler_options=BETWEEN_GPUS)
    with pytest.raises(Exception, match="No such compile option"):
        program.compile(compiler_options={"xla_gpu_no_such_option": True})


@pytest.mark.cuda
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for an H200 needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt",
)
@pytest.mark.parametrize(("chosen", "overlapped"), [("on", True), ("off", False)])
def test_a_layers_weights_arrive_while_another_computes(chosen, overlapped):
    program = Path(__file__).parents[1] / "support/pipelined.py"
    run = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "LRKV_XLA_FLAGS": chosen},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    between = json.loads(run.stdout.splitlines()[-1])
    assert between and all((count > 0) == overlapped for count in between)


def test_memory_is_taken_unless_the_user_says_how_much():
    untold, told, older = (
        {},
        {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
    )
    for environment in (untold, told, older):
        take_memory(environment)
    assert untold == {"XLA_CLIENT_MEM_FRACTION": MEMORY_FRACTION}
    # JAX refuses both names together.
    assert len(told) == len(older) == 1 and told["XLA_CLIENT_MEM_FRACTION"] == "0.5"
