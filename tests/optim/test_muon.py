"""Muon against its formulas in float64 numpy, against optax.contrib, and across devices.

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

from lrkv_jax.models.weights import WeightSpec
from lrkv_jax.optim.muon import QUINTIC, orthogonalize, scale_by_muon

# A rounding error of float32 in X, whose Frobenius norm is 1, grows with the slope at zero of each
# of the five iterations: 3.4445⁵ · 1.2e-7 = 5.8e-5.
FLOAT32 = QUINTIC[0] ** 5 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Case:
    """A weight, and its matrices: the indices of each, as rows of blocks side by side."""

    spec: WeightSpec
    shape: tuple[int, ...]
    matrices: tuple[list[list[tuple]], ...]  # of each matrix: block rows of indices
    optax_axes: optax.contrib.MuonDimensionNumbers


def case(layout, shape, matrices, inputs, outputs, stacked=False):
    spec = WeightSpec.parse(layout)
    axes = optax.contrib.MuonDimensionNumbers(inputs, outputs)
    return Case(spec.stacked() if stacked else spec, shape, tuple(matrices), axes)


ALL = slice(None)
CASES = {
    "wide": case("embed -> mlp", (12, 20), [[[(ALL, ALL)]]], 0, 1),
    "tall": case("mlp -> embed", (20, 12), [[[(ALL, ALL)]]], 0, 1),
    "layers": case("embed -> mlp", (3, 12, 20), [[[(n,)]] for n in range(3)], 1, 2, stacked=True),
    "lrkv_U": case(
        "heads: embed -> rank",
        (2, 3, 12, 5),
        [[[(n, h)]] for n in range(2) for h in range(3)],
        2,
        3,
        stacked=True,
    ),
    "lrkv_B": case(
        "heads: rank -> head",
        (2, 3, 5, 8),
        [[[(n, h)]] for n in range(2) for h in range(3)],
        2,
        3,
        stacked=True,
    ),
    # D × (H · K): the heads' blocks lie side by side.
    "heads_out": case(
        "embed -> heads head",
        (2, 10, 3, 4),
        [[[(n, ALL, h) for h in range(3)]] for n in range(2)],
        1,
        (2, 3),
        stacked=True,
    ),
    # (H · K) × D: the heads' blocks lie one under another.
    "heads_in": case("heads head -> embed", (3, 4, 10), [[[(h,)] for h in range(3)]], (0, 1), 2),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


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


def first_update(gradient, spec, **options):
    """Jitted: one program, not one for each operation."""
    transform = scale_by_muon(spec, **options)
    return jax.jit(lambda gradient: transform.update(gradient, transform.init(gradient))[0])(
        gradient
    )


def relative(x, reference):
    return float(np.linalg.norm(np.asarray(x) - reference) / np.linalg.norm(reference))


@each_case
def test_agrees_with_float64_numpy_over_six_steps(case):
    betas = [0.85, 0.87, 0.89, 0.91, 0.93, 0.95]
    transform = scale_by_muon(case.spec, momentum=optax.linear_schedule(0.85, 0.95, 5))
    gradients = [gaussians(*case.shape, seed=step) * 3.0**step for step in range(6)]
    updates, state = run(transform, gradients)

    references = [NumpyMuon(matrix.shape) for matrix in matrices_of(gradients[0], case)]
    scale = max(1.0, *case.spec.fans(case.shape)) ** 0.5
    for beta, gradient, update in zip(betas, gradients, updates, strict=True):
        chex.assert_equal_shape([update, gradient])
        for reference, g, ours in zip(
            references, matrices_of(gradient, case), matrices_of(update, case), strict=True
        ):
            np.testing.assert_allclose(ours, reference.step(g, beta), rtol=0, atol=FLOAT32 * scale)
    assert int(state.count) == 6


def with_values(values, columns):
    """A matrix with these singular values, and singular vectors that no axis is parallel to."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    right, _ = np.linalg.qr(rng.standard_normal((columns, len(values))))
    return left * values @ right.T


# Made when they are needed: a worker that only collects this file needs none.
HARD = {
    "geometric": lambda: with_values(np.geomspace(0.05, 1, 64), 64),
    "geometric_wide": lambda: with_values(np.geomspace(0.05, 1, 128), 512),
    "one_large": lambda: with_values(np.r_[1, np.full(31, 0.2)], 128),
    "one_large_tall": lambda: with_values(np.r_[1, np.full(31, 0.2)], 128).T,
}


@pytest.mark.parametrize(
    "u",
    [
        pytest.param(partial(gaussians, 32, 128), id="32x128"),
        pytest.param(partial(gaussians, 64, 64), id="64x64"),
        pytest.param(partial(gaussians, 512, 128), id="512x128", marks=pytest.mark.slow),
        pytest.param(partial(gaussians, 768, 51), id="768x51", marks=pytest.mark.slow),
        *(
            pytest.param(u, id=name, marks=pytest.mark.slow if "wide" in name else ())
            for name, u in HARD.items()
        ),
    ],
)
def test_bfloat16_iterations_keep_the_quintic(u):
    """Within 2.5 % of float64 (A1): with the coefficients rounded too, it is 3 to 10 %."""
    u = np.asarray(u(), np.float64)
    exact = numpy_orthogonalize(u)
    rounded = np.asarray(orthogonalize(jnp.asarray(u, jnp.float32), dtype=jnp.bfloat16))
    assert rounded.dtype == np.float32
    # Far more than float32's rounding: the iterations did run in bfloat16.
    assert 2.0**-9 < relative(rounded, exact) < 0.025


@pytest.mark.parametrize("dtype, least", [("float32", 0.68), ("bfloat16", 0.675)])
@pytest.mark.parametrize("u", HARD.values(), ids=HARD)
def test_singular_values_come_out_in_the_documented_interval(u, dtype, least):
    """Singular values from 0.05 of the largest (A1): with rounded coefficients, 0.64 to 0.67."""
    x = orthogonalize(jnp.asarray(u(), jnp.float32), dtype=dtype)
    values = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    assert least < values.min() and values.max() < 1.21


@pytest.mark.parametrize("dtype, precision", [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_float32_iterations_are_not_tensorfloat32(dtype, precision):
    iterations = jax.jit(lambda u: orthogonalize(u, iterations=1, dtype=dtype))
    products = [
        line
        for line in iterations.lower(gaussians(8, 8)).as_text().splitlines()
        if "dot_gen" in line
    ]
    assert len(products) == 3 and all(precision in line for line in products)


@each_case
def test_each_matrix_of_a_batch_is_alone(case):
    """Alone or in a batch, beside a matrix a thousand times larger: the same update."""
    sizes = 10.0 ** (3 * np.arange(math.prod(case.shape[: case.spec.batch])) % 7)
    matrix_axes = len(case.shape) - case.spec.batch
    sizes = sizes.reshape(*case.shape[: case.spec.batch], *(1,) * matrix_axes)
    gradient = np.float32(gaussians(*case.shape) * sizes)
    together = matrices_of(first_update(gradient, case.spec), case)
    for matrix, ours in zip(matrices_of(gradient, case), together, strict=True):
        expected = NumpyMuon(matrix.shape).step(matrix, 0.95)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2 * FLOAT32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_gradients_give_zero_updates(dtype):
    specs = {name: CASES[name].spec for name in ("wide", "lrkv_U")}
    zeros = {name: np.zeros(CASES[name].shape, np.float32) for name in specs}
    updates, state = run(scale_by_muon(specs, dtype=dtype), [zeros])
    chex.assert_trees_all_equal(updates[0], zeros)
    chex.assert_trees_all_equal(state.momentum, zeros)


def test_zero_size_weights_pass_through():
    specs = {"U": CASES["lrkv_U"].spec, "B": CASES["lrkv_B"].spec}
    empty = {"U": jnp.zeros((2, 3, 12, 0)), "B": jnp.zeros((2, 3, 0, 8))}
    updates, state = run(scale_by_muon(specs), [empty, empty])
    chex.assert_trees_all_equal_shapes_and_dtypes(updates[-1], state.momentum, empty)


def test_a_spec_that_misses_an_axis_is_refused():
    """Unstacked specs on stacked weights would make the layers part of the fan-in."""
    with pytest.raises(AssertionError, match="rank"):
        first_update(gaussians(3, 12, 20), WeightSpec.parse("embed -> mlp"))


def optax_muon(case, beta):
    return optax.contrib.muon(
        -1.0, beta=beta, eps=1e-7, muon_weight_dimension_numbers={"w": case.optax_axes}
    )


def compare_with_optax(case, gradients, beta):
    """The relative difference of the updates of each step."""
    gradients = [{"w": g} for g in gradients]
    ours, _ = run(scale_by_muon({"w": case.spec}, momentum=beta), gradients)
    optimizer = optax_muon(case, beta)
    state = optimizer.init(gradients[0])
    update = jax.jit(optimizer.update)
    differences = []
    for gradient, mine in zip(gradients, ours, strict=True):
        theirs, state = update(gradient, state, gradient)
        differences.append(relative(mine["w"], np.asarray(theirs["w"])))
    return differences


@pytest.mark.parametrize("name", ["wide", "lrkv_U", "heads_out", "heads_in"])
def test_first_update_agrees_with_optax(name):
    """The first momentum is a multiple of the gradient, with or without bias correction."""
    case = CASES[name]
    assert compare_with_optax(case, [gaussians(*case.shape)], 0.95)[0] < FLOAT32


def test_later_updates_differ_from_optax_by_its_bias_correction():
    """By several per cent at first; when its correction by β^t has vanished, not at all."""
    case = CASES["layers"]
    gradients = [gaussians(*case.shape, seed=step) for step in range(32)]
    differences = compare_with_optax(case, gradients, 0.5)
    assert differences[0] < FLOAT32
    assert differences[1] > 0.02
    assert max(differences[28:]) < FLOAT32
    assert min(compare_with_optax(case, gradients[:4], 0.95)[1:]) > 0.03
