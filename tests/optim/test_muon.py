"""Muon against float64 numpy and optax.contrib; on a mesh, against itself on one device.

L layers  H heads  D width  F hidden  R rank  K head width
"""

import math
from dataclasses import dataclass
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from support.meshes import mesh_of

from lrkv_jax.distributed.rules import partition
from lrkv_jax.models.weights import WeightSpec
from lrkv_jax.optim import scale_by_muon
from lrkv_jax.optim.muon import QUINTIC, orthogonalize

# A rounding error of float32 in X, whose Frobenius norm is 1, grows with the slope at zero of each
# of the five iterations: 3.4445⁵ · 1.2e-7 = 5.8e-5.
FLOAT32 = QUINTIC[0] ** 5 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Case:
    """A weight, and its matrices: the indices of each, as rows of blocks side by side."""

    spec: WeightSpec
    shape: tuple[int, ...]
    matrices: list[list[list[tuple]]]  # of each matrix: block rows of indices


ALL = slice(None)
spec = WeightSpec.parse
EACH_HEAD = [[[(n, h)]] for n in range(2) for h in range(3)]
ABREAST = [[[(n, ALL, h) for h in range(3)]] for n in range(2)]
CASES = {
    "wide": Case(spec("embed -> mlp"), (12, 20), [[[(ALL, ALL)]]]),
    "lrkv_U": Case(spec("heads: embed -> rank").stacked(), (2, 3, 12, 5), EACH_HEAD),
    # D × (H · K): the heads' blocks lie side by side.
    "heads_out": Case(spec("embed -> heads head").stacked(), (2, 10, 3, 4), ABREAST),
    # (H · K) × D: the heads' blocks lie one under another.
    "heads_in": Case(spec("heads head -> embed"), (3, 4, 10), [[[(h,)] for h in range(3)]]),
}


def numpy_orthogonalize(u, iterations=5, eps=1e-7):
    """X ← aX + (bA + cA²)X with A = XXᵀ, from X = u/(‖u‖ + eps), in float64."""
    x = u / (math.sqrt((u**2).sum()) + eps)
    if u.shape[0] > u.shape[1]:
        x = x.T
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x.T if u.shape[0] > u.shape[1] else x


class NumpyMuon:
    """The reference: one matrix, float64, momentum averaged without bias correction."""

    def __init__(self, shape):
        self.momentum = np.zeros(shape)

    def step(self, gradient, beta):
        self.momentum += (1 - beta) * (gradient - self.momentum)
        nesterov = gradient + beta * (self.momentum - gradient)
        fan_in, fan_out = gradient.shape
        return math.sqrt(max(1, fan_out / fan_in)) * numpy_orthogonalize(nesterov)


def matrices_of(array, case):
    """The matrices of a weight, put together block by block."""
    array = np.asarray(array, np.float64)
    return [np.block([[array[index] for index in row] for row in rows]) for rows in case.matrices]


def gaussians(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def run(transform, gradients):
    """The updates of successive gradients, and the last state."""
    update = jax.jit(transform.update)
    state = transform.init(jax.tree.map(np.zeros_like, gradients[0]))
    updates = []
    for gradient in gradients:
        new, state = update(gradient, state)
        updates.append(new)
    return updates, state


def relative(x, reference):
    return np.linalg.norm(np.asarray(x) - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_agrees_with_float64_numpy_over_six_steps(case):
    """Each matrix of a batch alone, beside others that are up to a million times larger."""
    betas = [0.85, 0.87, 0.89, 0.91, 0.93, 0.95]
    transform = scale_by_muon(case.spec, momentum=optax.linear_schedule(0.85, 0.95, 5))
    batch = case.shape[: case.spec.batch]
    sizes = 10.0 ** (3 * np.arange(math.prod(batch)) % 7)
    sizes = np.float32(sizes.reshape(*batch, *(1,) * (len(case.shape) - len(batch))))
    gradients = [gaussians(*case.shape, seed=step) * 3.0**step * sizes for step in range(6)]
    updates, state = run(transform, gradients)

    references = [NumpyMuon(matrix.shape) for matrix in matrices_of(gradients[0], case)]
    scale = max(1.0, *case.spec.fans(case.shape)) ** 0.5
    for beta, gradient, update in zip(betas, gradients, updates, strict=True):
        for reference, g, ours in zip(
            references, matrices_of(gradient, case), matrices_of(update, case), strict=True
        ):
            np.testing.assert_allclose(ours, reference.step(g, beta), rtol=0, atol=FLOAT32 * scale)
    assert int(state.count) == 6


@pytest.mark.parametrize(("name", "axes"), [("lrkv_U", (2, 3)), ("heads_in", ((0, 1), 2))])
def test_the_first_update_agrees_with_optax(name, axes):
    """The first momentum is a multiple of the gradient, with or without its bias correction."""
    case, dimensions = CASES[name], optax.contrib.MuonDimensionNumbers(*axes)
    gradient = {"w": gaussians(*case.shape)}
    (ours,), _ = run(scale_by_muon({"w": case.spec}), [gradient])
    how = {"muon_weight_dimension_numbers": {"w": dimensions}}
    optimizer = optax.contrib.muon(-1.0, beta=0.95, eps=1e-7, **how)
    theirs, _ = jax.jit(optimizer.update)(gradient, optimizer.init(gradient), gradient)
    assert relative(ours["w"], np.asarray(theirs["w"])) < FLOAT32


def with_values(values, columns):
    """A matrix with these singular values, and singular vectors that no axis is parallel to."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    right, _ = np.linalg.qr(rng.standard_normal((columns, len(values))))
    return left * values @ right.T


# Made when they are needed: a worker that only collects this file needs none.
HARD = {
    "geometric": lambda: with_values(np.geomspace(0.05, 1, 64), 64),
    "one_large": lambda: with_values(np.r_[1, np.full(31, 0.2)], 128),
    "one_large_tall": lambda: with_values(np.r_[1, np.full(31, 0.2)], 128).T,
}


@pytest.mark.parametrize(
    "u", [partial(gaussians, 32, 128), *HARD.values()], ids=["gaussian", *HARD]
)
def test_bfloat16_iterations_keep_the_quintic(u):
    """Within 2.5 % of float64 (A1): with the coefficients rounded too, it is 3 to 10 %.

    Singular values from 0.05 of the largest come out in an interval: with those, from 0.64.
    """
    u = np.asarray(u(), np.float64)
    exact = numpy_orthogonalize(u)
    rounded = np.asarray(orthogonalize(jnp.asarray(u, jnp.float32), dtype=jnp.bfloat16))
    assert rounded.dtype == np.float32
    # Far more than float32's rounding: the iterations did run in bfloat16.
    assert 2.0**-9 < relative(rounded, exact) < 0.025
    values = np.linalg.svd(np.float64(rounded), compute_uv=False)
    assert 0.675 < values.min() and values.max() < 1.21


@pytest.mark.parametrize("dtype, precision", [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_float32_iterations_are_not_tensorfloat32(dtype, precision):
    iterations = jax.jit(lambda u: orthogonalize(u, iterations=1, dtype=dtype))
    lines = iterations.lower(gaussians(8, 8)).as_text().splitlines()
    products = [line for line in lines if "dot_gen" in line]
    assert len(products) == 3 and all(precision in line for line in products)


def test_zeros_stay_zeros():
    zeros = {"zero": jnp.zeros((2, 3, 12, 5))}
    updates, state = run(scale_by_muon({"zero": CASES["lrkv_U"].spec}), [zeros, zeros])
    chex.assert_trees_all_equal(updates[1], state.momentum, zeros)


# Five layers divide no mesh: every batch is padded. Query and output share a shape once one of
# them is flipped, as do the MLP's two; a shared key has no axis for tensor; factors lie in heads.
WEIGHTS = {
    "query": ("embed -> heads head_width", (5, 16, 4, 8)),
    "output": ("heads head_width -> embed", (5, 4, 8, 16)),
    "shared": ("embed -> head_width", (5, 16, 8)),
    "down": ("heads: embed -> rank", (5, 4, 16, 3)),
    "up": ("heads: rank -> head_width", (5, 4, 3, 8)),
    "mlp_up": ("embed -> mlp", (5, 16, 24)),
    "mlp_down": ("mlp -> embed", (5, 24, 16)),
}
SPECS = {name: WeightSpec.parse(layout).stacked() for name, (layout, _) in WEIGHTS.items()}


def gradients():
    rng = np.random.default_rng(3)
    return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, (_, s) in WEIGHTS.items()}


def on_mesh(f, sizes, tree):
    """f(tree), jitted, with the tree placed as a training step places it."""
    mesh = mesh_of(*sizes)
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, partition(SPECS[name].axes, x.shape, mesh)))
        for name, x in tree.items()
    }
    with jax.set_mesh(mesh):
        return jax.jit(f)(placed)


def updates(dtype):
    muon = scale_by_muon(SPECS, iterations=1, dtype=dtype)
    return lambda tree: muon.update(tree, muon.init(tree))[0]


MESHES = [("float32", (1, 2, 2, 2)), ("float32", (1, 8, 1, 1)), ("bfloat16", (2, 2, 1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sizes"), MESHES, ids=str)
def test_every_mesh_gives_one_devices_update(dtype, sizes):
    got = on_mesh(updates(dtype), sizes, gradients())
    # The norms' sums differ in their last bit, and bfloat16 then rounds an entry here and there to
    # its neighbor, 2⁻⁸ away; the iteration multiplies that by up to 3.4.
    rounding = 3.5 * 2.0**-8 if dtype == "bfloat16" else 3e-6
    for name, truth in jax.jit(updates(dtype))(gradients()).items():
        np.testing.assert_allclose(got[name], truth, atol=rounding, err_msg=name)
