"""A training step of every variant, against the same step on the CPU.

The CPU's step attends in float32 by another kernel (`chunked`), and is compiled without LLVM's
optimisations. Weights are random, none zero: at initialisation the output projections are zero, and
whatever attention computes would change nothing.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lrkv_jax.bench.lines import OWN, lines_of
from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.doctor.finding import FAST_COMPILE, WRONG, Finding, at, judged
from lrkv_jax.model import abstract_parameters, specs
from lrkv_jax.runtime import xla
from lrkv_jax.sharding import batch_sharding, make_mesh
from lrkv_jax.train.guard import GuardState
from lrkv_jax.train.state import TrainState, new_state, resolve, state_shardings
from lrkv_jax.train.step import make_train_step

SCALE = "128m"
WIDTH = 192
SMALL = (
    "model.layers=2", f"model.width={WIDTH}", "model.heads=6", "model.head_width=64",
    "model.feed_forward=256", "model.vocabulary=512", "model.unroll=1", "train.context=64",
    "optimizer.warmup=0",
)  # fmt: skip

# Norm of a difference over the norm, the worst array. Moments are linear in the gradient: float32
# gives 1e-6, bfloat16 2.5e-2. Newton–Schulz lifts a gradient's small directions, rounding and
# all: the changes of the weights are 2e-4 and 0.16 apart (five variants, on a CPU).
ALLOWED = {
    "float32": {"loss": 1e-5, "moments": 1e-4, "changes": 2e-2},
    "bfloat16": {"loss": 1e-2, "moments": 0.1, "changes": 0.5},
}


def of_variant(variant: str) -> Finding:
    """One step on this machine's devices, and one on a CPU device."""
    here = jax.local_devices()
    if WIDTH % len(here) or here[0].platform == "cpu":  # simulated devices say nothing more
        here = here[:1]
    rows = f"train.batch={2 * len(here)}"
    (line,) = lines_of(SCALE, [variant], [OWN], overrides=(*SMALL, rows))
    subject = resolve(line.config)
    cpu = make_mesh(MeshConfig(), jax.devices("cpu")[:1])
    meshes = [make_mesh(MeshConfig(data=1, fsdp=len(here)), here), cpu]
    at("compiling and one step on each side")
    with ThreadPoolExecutor(2) as both:
        results = list(both.map(_after_a_step, [subject, _exact(line.config)], meshes))
    name, (ours, truth) = f"training step, {variant}", results
    return check_step(name, ours, truth, ALLOWED[subject.model.dtype])


def check_step(
    name: str, ours: dict[str, Any], truth: dict[str, Any], allowed: dict[str, float]
) -> Finding:
    """What two steps left: `loss`, and lists of arrays `moments` and `changes` of the weights."""
    errors = {part: _apart(ours[part], truth[part]) for part in allowed}
    faults = {
        f"{part} differs from the CPU's by {error:.0e}, {allowed[part]:.0e} allowed"
        if math.isfinite(error)
        else f"{part} is not finite": WRONG
        for part, error in errors.items()
        if error > allowed[part]
    }
    says = ", ".join(f"{part} within {error:.0e}" for part, error in errors.items())
    measured = {"errors": errors, "allowed": allowed, "loss": float(ours["loss"][0])}
    return judged(name, faults, f"loss {ours['loss'][0]:.3f}, {says}", measured)


def _exact(config: RunConfig) -> RunConfig:
    """The run in float32, by a kernel that is plain XLA."""
    model = config.model.model_copy(update={"dtype": "float32", "train_kernel": "chunked"})
    muon = config.optimizer.muon.model_copy(update={"dtype": "float32"})
    optimizer = config.optimizer.model_copy(update={"muon": muon})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def _after_a_step(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """The loss, moments and changed weights of a step from random weights, on the host."""
    vocabulary, train = config.model.vocabulary, config.train
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shape = (train.batch, train.context + 1)
    tokens_BU = np.random.default_rng(1).integers(0, vocabulary, shape, np.int32)
    step = make_train_step(config, mesh, np.ones(vocabulary, np.int32))
    with jax.set_mesh(mesh):
        state = _random_state(config)
        arguments = (
            jax.tree.leaves(jax.device_put(state, state_shardings(config, mesh))),
            jax.device_put(tokens_BU, batch_sharding(mesh)),
        )
        lowered = step.on_leaves.lower(*arguments)
        leaves, metrics = lowered.compile(FAST_COMPILE if on_cpu else xla.options(mesh))(*arguments)
    new = step.tree.unflatten(leaves)
    changes = jax.tree.map(lambda a, b: np.asarray(a) - b, new.params, state.params)
    moments = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(new.opt_state)]
    loss = np.array([metrics.floats()["loss"]])
    return {"loss": loss, "moments": moments, "changes": jax.tree.leaves(changes)}


def _random_state(config: RunConfig) -> TrainState:
    """The state before the first step on the host, its weights N(0, 1 / fan-in)."""
    rng = np.random.default_rng(0)

    def draw(spec, leaf):
        if spec.group == "vector":
            return np.float32(1 + 0.3 * rng.standard_normal(leaf.shape))
        std = 1.0 if spec.group == "embedding" else spec.fans(leaf.shape)[0] ** -0.5
        return np.float32(std * rng.standard_normal(leaf.shape))

    def zeros(leaf):
        key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key(0) if key else np.zeros(leaf.shape, leaf.dtype)

    state = jax.tree.map(zeros, jax.eval_shape(lambda: new_state(config)))
    params = jax.tree.map(draw, specs(config.model), abstract_parameters(config.model))
    # Arrays of their own: the step consumes each of them.
    return replace(state, params=params, guard=jax.tree.map(np.array, GuardState.fresh()))


def _apart(ours: Any, truth: Any) -> float:
    """The largest norm of a difference over the norm; infinite for what is not finite."""
    worst = 0.0
    for a, b in zip(ours, truth, strict=True):
        a, b = np.float64(a), np.float64(b)
        if not np.isfinite(a).all():
            return math.inf
        off, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
        worst = max(worst, off / max(size, 1e-30))
    return worst
