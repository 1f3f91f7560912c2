"""On a GPU: a training step of every variant, against the same step on the CPU.

`pytest -m gpu tests/training`. The CPU's step attends in float32 by another kernel (`chunked`), and
is compiled without LLVM's optimizations. Weights are random, none zero: at initialization the
output projections are zero, and whatever attention computes would change nothing.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.variants import random_params

from lrkv_jax.config import MeshConfig, load_config
from lrkv_jax.distributed.compilation import xla_options
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.kernels.flash import causal_attention
from lrkv_jax.lab.bench.report import variants_of
from lrkv_jax.models.attention import context_parallel
from lrkv_jax.training.state import init_state, resolve, state_shardings
from lrkv_jax.training.step import make_train_step

SCALE = "128m"
WIDTH = 192
SMALL = (
    "model.layers=2", f"model.width={WIDTH}", "model.heads=6", "model.head_width=64",
    "model.feed_forward=256", "model.vocabulary=512", "model.unroll=1", "train.seq_len=64",
    "optimizer.warmup_steps=0",
)  # fmt: skip
FAST_COMPILE = {"xla_backend_optimization_level": 0}

# Norm of a difference over the norm, the worst array. Moments are linear in the gradient: float32
# gives 1e-6, bfloat16 2.5e-2. Newton–Schulz lifts a gradient's small directions, rounding and
# all: the changes of the weights are 2e-4 and 0.16 apart (five variants, on a CPU).
ALLOWED = {
    "float32": {"loss": 1e-5, "moments": 1e-4, "changes": 2e-2},
    "bfloat16": {"loss": 1e-2, "moments": 0.1, "changes": 0.5},
}


def differences(variant):
    """(what one step here and one on the CPU differ by, what is allowed)."""
    here = jax.local_devices()
    if WIDTH % len(here) or here[0].platform == "cpu":  # simulated devices say nothing more
        here = here[:1]
    rows = f"train.global_batch_size={2 * len(here)}"
    config = variants_of(SCALE, [variant], overrides=(*SMALL, rows))[variant]
    subject = resolve(config)
    cpu = make_mesh(MeshConfig(), jax.devices("cpu")[:1])
    meshes = [make_mesh(MeshConfig(data=1, fsdp=len(here)), here), cpu]
    with ThreadPoolExecutor(2) as both:
        ours, truth = both.map(after_a_step, [subject, exact(config)], meshes)
    allowed = ALLOWED[subject.model.dtype]
    return {part: apart(ours[part], truth[part]) for part in allowed}, allowed


@pytest.mark.gpu
@pytest.mark.parametrize("variant", load_config(SCALE).variants)
def test_a_step_is_the_cpus(variant):
    if jax.default_backend() != "gpu":
        pytest.skip(f"it compares a GPU, and the backend is {jax.default_backend()}")
    found, allowed = differences(variant)
    assert all(found[part] <= allowed[part] for part in allowed), found


@pytest.mark.slow
def test_the_check_of_a_step_passes_on_a_cpu_and_finds_attention_that_is_wrong(monkeypatch):
    found, allowed = differences("lrkv")
    assert all(found[part] <= allowed[part] for part in allowed), found

    def wrong(q, k, v, **how):  # of the step, and not of the float32 that it is compared with
        return causal_attention(q, k * (1.01 if how["impl"] == "auto" else 1), v, **how)

    monkeypatch.setattr(context_parallel, "causal_attention", wrong)
    found, allowed = differences("lrkv")
    assert found["moments"] > allowed["moments"]


def exact(config):
    """The run in float32, by a kernel that is plain XLA."""
    model = config.model.model_copy(update={"dtype": "float32", "train_kernel": "chunked"})
    muon = config.optimizer.muon.model_copy(update={"dtype": "float32"})
    optimizer = config.optimizer.model_copy(update={"muon": muon})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def after_a_step(config, mesh):
    """The loss, moments and changed weights of a step from random weights, on the host."""
    vocabulary, train = config.model.vocabulary, config.train
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shape = (train.global_batch_size, train.seq_len + 1)
    tokens_BU = np.random.default_rng(1).integers(0, vocabulary, shape, np.int32)
    step = make_train_step(config, mesh, np.ones(vocabulary, np.int32))
    params = jax.tree.map(np.asarray, random_params(config.model))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, state_shardings(config, mesh).params)
        state = replace(init_state(config, mesh), params=placed)
        arguments = state, jax.device_put(tokens_BU, batch_sharding(mesh))
        lowered = step.lower(*arguments)
        new, metrics = lowered.compile(FAST_COMPILE if on_cpu else xla_options(mesh))(*arguments)
    changes = jax.tree.map(lambda a, b: np.asarray(a) - b, new.params, params)
    moments = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(new.opt_state)]
    loss = np.array([float(metrics["loss"])])
    return {"loss": loss, "moments": moments, "changes": jax.tree.leaves(changes)}


def apart(ours, truth):
    """The largest norm of a difference over the norm; infinite for what is not finite."""
    worst = 0.0
    for a, b in zip(ours, truth, strict=True):
        a, b = np.float64(a), np.float64(b)
        if not np.isfinite(a).all():
            return math.inf
        off, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
        worst = max(worst, off / max(size, 1e-30))
    return worst
