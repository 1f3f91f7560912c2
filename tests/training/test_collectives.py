"""The compiled step says what `docs/parallelism.md` predicts, kind by kind, and computes once.

Read from the optimized HLO of the whole step on eight simulated devices.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hlo
from support.meshes import mesh_of
from support.tiny import TINY

from lrkv_jax.config import load_config
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.loss import make_gradient
from lrkv_jax.training.state import abstract_state, resolve
from lrkv_jax.training.step import make_train_step

LAYERS = 3
# No other axis of any array is as long as one of these.
WIDTH, RANK, TOKENS = 72, 5, 40
SHAPE = (
    f"model.layers={LAYERS}", f"model.width={WIDTH}", "model.vocabulary=48",
    f"variants.lrkv.rank={RANK}", f"variants.lrkv_latent.rank={RANK}", "run_dir=unused",
)  # fmt: skip


def configured(*overrides):
    return resolve(load_config("configs/quickstart.yaml", [*TINY, *SHAPE, *overrides]))


def batch_shape(mesh):
    return jax.ShapeDtypeStruct((8, TOKENS + 1), np.int32, sharding=batch_sharding(mesh))


@functools.cache
def step_text(variant, mesh_sizes, *overrides):
    """The optimized HLO of a step."""
    config, mesh = configured(f"attention={variant}", *overrides), mesh_of(*mesh_sizes)
    with jax.set_mesh(mesh):
        step = make_train_step(config, mesh, np.ones(config.model.vocabulary, np.int32))
        lowered = step.lower(abstract_state(config, mesh), batch_shape(mesh))
        return lowered.compile().as_text()


def counted(text):
    """Collectives of a layer's forward and backward turn, and outside the layers.

    All-reduces are counted by what they sum: the compiler joins several into one.
    """
    counts = {"forward": Counter(), "backward": Counter(), "once": Counter()}
    for i in hlo.collectives(text):
        if "while/body" in i.scope and i.times == LAYERS:
            where = "backward" if "transpose(" in i.scope else "forward"
        else:
            where = "once"
        counts[where][i.kind] += 1 if i.kind != "all-reduce" else len(i.shapes)
    return {where: dict(kinds) for where, kinds in counts.items()}


# Weights of a layer that fsdp splits: queries, keys, values, output and two of the MLP; LRKV has
# two more for its residuals, and two factors that are whole; MLA has its latent and rope key in
# place of keys and values, a second query, and two whole factors.
EXPECTED = {
    ("mha", (1, 8, 1, 1)): {
        "forward": {"all-gather": 6},
        "backward": {"all-gather": 6, "reduce-scatter": 6},
    },
    ("lrkv_latent", (1, 2, 2, 2)): {
        # Queries, keys, values and outputs change between heads and positions: 4 all-to-alls.
        "forward": {"all-gather": 8, "all-to-all": 4, "all-reduce": 2},
        # Over context the 8 and the 2 whole factors; over tensor the gradients of the attention's
        # and the MLP's input, and those of the shared key and value.
        "backward": {
            "all-gather": 8, "reduce-scatter": 8, "all-to-all": 4, "all-reduce": 8 + 2 + 2 + 2,
        },
    },
    ("mqa", (2, 2, 2, 1)): {
        # One key head cannot change places: it is gathered over context, its gradient scattered.
        "forward": {"all-gather": 6 + 2, "all-to-all": 2},
        "backward": {"all-gather": 6, "reduce-scatter": 6 + 2, "all-to-all": 2, "all-reduce": 6},
    },
    # The MLP's gate is a further weight, and its two products' gradients are one sum.
    ("mla", (1, 4, 1, 2), "model.gated=true"): {
        "forward": {"all-gather": 8, "all-reduce": 2},
        # The latent's and the rope key's weights are whole on every tensor shard.
        "backward": {"all-gather": 8, "reduce-scatter": 8, "all-reduce": 2 + 2 + 2},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("key", EXPECTED, ids=str)
def test_a_layer_says_what_the_table_predicts(key):
    counts = counted(step_text(*key))
    for turn, expected in EXPECTED[key].items():
        assert counts[turn] == expected, turn


@pytest.mark.slow
def test_a_step_gathers_a_layer_at_a_time_and_shares_newton_schulz():
    text = step_text("mha", (1, 8, 1, 1))
    once = counted(text)["once"]
    # All-gathers: tokens for the embedding, and the head. All-to-alls: the embedding's columns
    # forward and backward; Muon's two shapes (D × D and D × 4D) there and back.
    assert once["all-gather"] == 2
    assert once["all-to-all"] == 2 + 2 * 2
    assert once["reduce-scatter"] == 1  # of the head's gradient
    assert "collective-permute" not in once
    # The rest are numbers: the loss, its text's nats and bytes, the gradient's norm, the batch's
    # fingerprint, and a norm for each of Muon's matrices.
    for i in hlo.collectives(text):
        assert i.kind != "all-reduce" or all(len(shape) <= 1 for shape in i.shapes)
    found = hlo.instructions(text)
    # A weight's rows are split: an axis of the whole width beside the layers' axis would be a
    # gathered stack. Activations have both, beside a device's tokens, as two axes or one.
    stacks = {
        shape for i in found for shape in i.shapes if shape[:1] == (LAYERS,) and WIDTH in shape[1:]
    }
    assert stacks, "the stream itself is kept for the backward pass"
    assert stacks <= {(LAYERS, 1, TOKENS, WIDTH), (LAYERS, TOKENS, WIDTH)}
    gathered = [i for i in found if i.kind == "all-gather" and WIDTH in i.shapes[0]]
    assert len(gathered) > 10
    assert {i.times for i in gathered if "head" not in i.scope} <= {LAYERS, 1}
    config = configured("attention=mha")
    products = [i for i in found if "muon" in i.scope and i.kind == "dot"]
    # Three products an iteration for each of the two shapes, D × HK and D × 4D.
    assert len(products) == 2 * 3 * config.optimizer.muon.iterations
    # 12 matrices of attention and 6 of the MLP: 2 and 1 on each of 8 devices. The compiler drops
    # the batch axis of the latter.
    inner = config.model.heads * config.model.head_width
    batches = {i.shapes[0][0] for i in products if i.shapes[0][-1] == inner}
    assert batches == {2}
    assert all(len(i.shapes[0]) == 2 or i.shapes[0][0] <= 2 for i in products)


def flops(f, config):
    """Of the matrix products of f(params, tokens) on one device."""
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        params = abstract_state(config, mesh).params
        compiled = jax.jit(f).lower(params, batch_shape(mesh)).compile()
    return hlo.product_flops(compiled.as_text())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lrkv_latent", "lrkv"])
def test_nothing_is_computed_twice_unasked(variant):
    config = configured(f"attention={variant}")

    def plain(params, tokens_BU):
        log_p_BTV = jax.nn.log_softmax(with_parameters(config.model, params)(tokens_BU[:, :-1]))
        return -jnp.mean(log_p_BTV * jax.nn.one_hot(tokens_BU[:, 1:], config.model.vocabulary))

    H, K = config.model.heads, config.model.head_width
    # B Bᵀ for keys' norms depends on weights alone, and is made again from the second gather.
    again = LAYERS * 2 * RANK**2 * H * K if variant == "lrkv_latent" else 0
    gradient = make_gradient(config, mesh_of(), np.ones(config.model.vocabulary))
    assert flops(gradient, config) - again == flops(jax.grad(plain), config) > 1e8
