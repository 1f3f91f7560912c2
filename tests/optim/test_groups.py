"""The optimizer of a whole model: which rule meets which weight, its rate and decay over time.

A stand-in for a model's parameters, stacked over two layers: an MLP kernel, LRKV's per-head
factors U and B, a norm's gain; the embedding and the head.
"""

import functools
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lrkv_jax.config.schema import MuonConfig, OptimizerConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.weights import WeightSpec
from lrkv_jax.optim import (
    learning_rates,
    make_optimizer,
    momentum_schedule,
    orthogonalize,
    schedule,
)

SHAPES = {
    "blocks": {
        "up": (2, 8, 16), "u": (2, 4, 8, 3), "b": (2, 4, 3, 6), "gain": (2, 8),
    },
    "embedding": {"table": (24, 8)},
    "head": {"kernel": (8, 24)},
}  # fmt: skip
SPECS = {
    "blocks": {
        "up": WeightSpec.parse("embed -> mlp").stacked(),
        "u": WeightSpec.parse("heads: embed -> rank").stacked(),
        "b": WeightSpec.parse("heads: rank -> head").stacked(),
        "gain": WeightSpec(("embed",), batch=0, inputs=1, group="vector").stacked(),
    },
    "embedding": {"table": WeightSpec.parse("vocabulary -> embed", "embedding")},
    "head": {"kernel": WeightSpec.parse("embed -> vocabulary", "head")},
}
TOTAL = 10
# One iteration is less to compile than five, where the direction is beside the point.
MUON = MuonConfig(momentum=0.95, iterations=1)
PLAIN = dict(
    warmup_steps=0, schedule="constant", grad_clip=None, matrix_decay=0.0, head_decay=0.0, muon=MUON
)


def random_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.float32(scale * rng.standard_normal(shape)),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def zeros():
    return jax.tree.map(np.zeros_like, random_tree(0))


@functools.cache
def optimizer_of(**options):
    """The optimizer, its update compiled once for each set of options."""
    config = OptimizerConfig(**{**PLAIN, **options})
    optimizer = make_optimizer(config, SPECS, TOTAL, muon_dtype="float32")
    return optimizer._replace(update=jax.jit(optimizer.update))


def first(gradients, **options):
    """The first update, and the state after it."""
    optimizer = optimizer_of(**options)
    return optimizer.update(gradients, optimizer.init(zeros()), zeros())


def moments(state, group):
    """The state of a group's rule: Muon's or Adam's."""
    return state[1].inner_states[group].inner_state[0]


def test_every_matrix_whatever_its_rank_moves_by_muon():
    gradients = random_tree(0)
    muon = MuonConfig(momentum=0.9, momentum_start=0.5, momentum_warmup=2, iterations=3)
    updates, state = first(gradients, matrix_lr=0.02, muon=muon)
    for name, scale in {"up": math.sqrt(2), "u": 1.0, "b": math.sqrt(2)}.items():
        gradient = gradients["blocks"][name]
        expected = -0.02 * scale * jax.jit(partial(orthogonalize, iterations=3))(gradient)
        np.testing.assert_allclose(updates["blocks"][name], expected, rtol=0, atol=1e-6)
        momentum = moments(state, "matrix").momentum["blocks"][name]
        np.testing.assert_allclose(momentum, 0.5 * gradient, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_clip_uses_the_norm_over_all_groups_before_anything_else(scale):
    """Seen in the moments after one step, since the updates themselves do not know the scale."""
    gradients = random_tree(0, scale)
    gradients["embedding"]["table"] *= 100  # the norm is mostly one group's; all are clipped
    norm = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradients)))
    assert (norm > 2) == (scale == 1.0)
    factor = min(1.0, 2 / norm)
    _, state = first(gradients, grad_clip=2.0, beta1=0.9, beta2=0.95)

    clipped = jax.tree.map(lambda g: factor * g, gradients)
    momentum, table = moments(state, "matrix").momentum, moments(state, "embedding")
    for name in ("up", "u", "b"):
        np.testing.assert_allclose(
            momentum["blocks"][name], 0.05 * clipped["blocks"][name], rtol=1e-4
        )
    kernel = clipped["head"]["kernel"]
    np.testing.assert_allclose(moments(state, "head").mu["head"]["kernel"], 0.1 * kernel, rtol=1e-4)
    np.testing.assert_allclose(
        table.nu["embedding"]["table"], 0.05 * clipped["embedding"]["table"] ** 2, rtol=1e-4
    )


def numpy_adamw(parameters, gradients, rates, decay, cautious, beta1=0.9, beta2=0.95, eps=1e-10):
    """Loshchilov & Hutter's Algorithm 2 in float64, decay scaled by the learning rate.

    Cautious: decayed where direction and weight agree in sign, by a share that is 0 at the end.
    """
    w = np.asarray(parameters, np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = np.asarray(g, np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        direction = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        share = (direction * w >= 0) * (TOTAL - t) / (TOTAL - 1) if cautious else 1.0
        w = w - rate * (direction + decay * share * w)
    return w


@pytest.mark.parametrize("cautious", [False, True])
def test_embedding_head_and_gains_follow_adamw_under_the_schedule(cautious):
    optimizer = optimizer_of(
        warmup_steps=3, schedule="linear", min_lr_ratio=0.1, embedding_decay=0.05, head_decay=0.2,
        cautious_decay=cautious,
    )  # fmt: skip
    parameters, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 7)]
    state, trained = optimizer.init(parameters), parameters
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, trained)
        trained = optax.apply_updates(trained, updates)

    # Warm-up 1/3, 2/3, 1 (step 2), then down to 0.1 at step 9 in seven strides.
    factors = [1 / 3, 2 / 3, 1.0, *(1 - 0.9 * stride / 7 for stride in (1, 2, 3))]
    for keys, peak, decay in (
        (("embedding", "table"), 0.2, 0.05),
        (("head", "kernel"), 0.004, 0.2),
        (("blocks", "gain"), 0.004, 0.0),
    ):
        pick = lambda tree, keys=keys: tree[keys[0]][keys[1]]  # noqa: E731
        rates, own = [peak * factor for factor in factors], [pick(g) for g in gradients]
        expected = numpy_adamw(pick(parameters), own, rates, decay, cautious)
        # Six float32 steps; 1 − β₂ᵗ loses a digit, and m/√v another where v is small.
        np.testing.assert_allclose(pick(trained), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cautious", [False, True])
def test_updates_use_the_learning_rates_of_the_logs(cautious):
    """With no gradient and no momentum, an update is −rate · decay · w: the rate can be read."""
    options = dict(
        warmup_steps=4, schedule="cosine", matrix_decay=1.0, head_decay=1.0, embedding_decay=1.0,
        cautious_decay=cautious,
    )  # fmt: skip
    optimizer, rates = optimizer_of(**options), learning_rates(OptimizerConfig(**options), TOTAL)
    parameters = random_tree(0)
    state = optimizer.init(parameters)
    for step in range(TOTAL):
        updates, state = optimizer.update(zeros(), state, parameters)
        for group, (branch, leaf) in {
            "matrix": ("blocks", "u"),
            "embedding": ("embedding", "table"),
            "head": ("head", "kernel"),
        }.items():
            ratio = -updates[branch][leaf] / parameters[branch][leaf]
            left = 1 - step / (TOTAL - 1) if cautious else 1.0
            np.testing.assert_allclose(ratio, left * rates(step)[group], rtol=1e-4)


def test_muon_iterates_and_momenta_are_kept_in_their_dtypes():
    gradients = random_tree(1)
    optimizer = make_optimizer(OptimizerConfig(**PLAIN), SPECS, TOTAL, muon_dtype="bfloat16")
    rounded, _ = jax.jit(optimizer.update)(gradients, optimizer.init(zeros()), zeros())
    whole, _ = first(gradients)
    difference = jnp.abs(rounded["blocks"]["up"] - whole["blocks"]["up"]).max()
    assert 1e-5 < difference < 0.02 * 0.2
    rounded, state = first(gradients, moments_dtype="bfloat16")
    head = moments(state, "head")
    assert moments(state, "matrix").momentum["blocks"]["u"].dtype == jnp.bfloat16
    assert head.mu["head"]["kernel"].dtype == jnp.bfloat16
    assert head.nu["head"]["kernel"].dtype == jnp.float32
    # Muon's first direction is that of the gradient itself; Adam's first step is its sign.
    chex.assert_trees_all_close(rounded, whole, rtol=2e-2, atol=1e-5)


STEPS = 64  # evaluated at once; a longer axis than any run below


@pytest.mark.parametrize(("warmup", "constant"), [(10, 0.0), (10, 0.5), (0, 0.0)])
def test_rises_stays_and_falls_as_its_formula_says(warmup, constant):
    """To the peak in the last step of the warm-up, to the final rate in the run's, step 49."""
    rises = max(warmup, 1)
    flat = round((50 - rises) * constant)
    share = np.arange(1, 51 - rises - flat) / (50 - rises - flat)
    falls = {"linear": 1 - 0.9 * share, "cosine": 0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2}
    for kind, fall in falls.items():
        rise = np.arange(1, rises + 1) / rises
        expected = np.r_[rise, np.ones(flat), fall, np.full(STEPS - 50, 0.1)]
        options = dict(warmup_steps=warmup, schedule=kind, min_lr_ratio=0.1, constant=constant)
        factor = schedule(OptimizerConfig(**options), 50)(jnp.arange(STEPS))
        np.testing.assert_allclose(factor, expected, atol=1e-6)


def test_a_warm_up_as_long_as_the_run_is_refused():
    message = r"optimizer\.warmup_steps = 10 .* 10 steps.*at most 9"
    with pytest.raises(LrkvError, match=message):
        schedule(OptimizerConfig(warmup_steps=10), 10)


def test_momentum_rises_linearly_to_its_value_or_is_constant():
    rising = MuonConfig(momentum=0.95, momentum_start=0.85, momentum_warmup=300)
    for config, expected in (
        (rising, {0: 0.85, 150: 0.9, 300: 0.95, 1000: 0.95}),
        (MuonConfig(momentum=0.9), {0: 0.9, 7: 0.9}),
        (MuonConfig(momentum=0.9, momentum_start=0.5, momentum_warmup=0), {0: 0.9, 7: 0.9}),
    ):
        momentum = momentum_schedule(config)
        for step, value in expected.items():
            assert momentum(step) == pytest.approx(value)
