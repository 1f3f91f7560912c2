"""One step, which consumes its state, is the same whatever the mesh and the microbatches."""

import chex
import jax
import numpy as np
import pytest
from support.variants import random_params

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.models.remat import NAMED
from lrkv_jax.models.transformer import abstract_parameters
from lrkv_jax.training.loss import make_gradient
from lrkv_jax.training.state import init_state, new_state, resolve, state_shardings
from lrkv_jax.training.step import make_train_step

MESHES = {
    "1x8x1x1": {"data": 1, "fsdp": 8},
    "2x2x2x1": {"data": 2, "fsdp": 2, "context": 2},
    "1x2x2x2": {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
}

LONG = "model.vocabulary=64", "train.steps=20"  # whoever stops sooner finds its program compiled


def batch(config, step=0):
    """Tokens that count up by one to five: there is something to learn."""
    rng = np.random.default_rng(step)
    first, by = rng.integers(1, 60, (2, config.train.global_batch_size, 1))
    places = np.arange(config.train.seq_len + 1)
    return ((first + (1 + by % 5) * places) % config.model.vocabulary).astype(np.int32)


def losses(config, mesh, steps):
    """Losses and gradient norms of the first steps, and the state after them."""
    token_bytes_V = np.ones(config.model.vocabulary, np.int32)
    rows = []
    # By one program for all meshes; tests/training/test_processes.py makes a state on several
    # devices.
    with jax.set_mesh(alone := one_device()):
        first = init_state(config, alone)
    with jax.set_mesh(mesh):
        state = jax.device_put(first, state_shardings(config, mesh))
        step = make_train_step(config, mesh, token_bytes_V)
        for number in range(steps):
            tokens = jax.device_put(batch(config, number), batch_sharding(mesh))
            before = state
            state, metrics = step(before, tokens)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
            rows.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(rows), state


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla", "lrkv"])
def test_twenty_steps_agree_with_one_device_on_every_mesh(tiny, variant):
    """LRKV on all of these meshes, the others on one that splits by every axis but data.

    MLA has latents of single heads, which tensor splits, beside the common one; GQA is in the block
    of pretrained models. tests/training/test_processes.py has meshes of data or tensor alone.
    """
    pretrained = ["model.gated=true", "model.qk_gain=true", "model.qkv_bias=true"]
    own = {"mla": ["attention.rank=2"], "gqa": pretrained}
    config = resolve(tiny(*LONG, f"attention={variant}", *own.get(variant, ())))
    alone, _ = losses(config, one_device(), 20)
    assert alone[0, 0] - alone[-1, 0] > 0.2
    for name in MESHES if variant == "lrkv" else ("1x2x2x2",):
        meshed, state = losses(config, make_mesh(MeshConfig(**MESHES[name])), 20)
        # Float32 sums in another order; the losses are about ln 64 = 4.2.
        np.testing.assert_allclose(meshed[:5], alone[:5], rtol=2e-5, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(meshed[:, 0], alone[:, 0], rtol=1e-4, err_msg=name)
    query = state.params["blocks"]["attention"]["query"]  # on 1x2x2x2
    assert query.sharding.spec[1:3] == ("fsdp", "tensor")
    assert query.addressable_shards[0].data.size == query.size // 4


@pytest.mark.slow
def test_a_residual_may_serve_heads_of_several_tensor_shards(tiny):
    """Two groups of two heads over four tensor shards: each takes its own heads' residual."""
    config = resolve(tiny("attention=lrkv", "attention.kv_heads=2", "model.vocabulary=64"))
    alone, _ = losses(config, one_device(), 3)
    meshed, state = losses(config, make_mesh(MeshConfig(data=2, fsdp=1, tensor=4)), 3)
    np.testing.assert_allclose(meshed, alone, rtol=2e-5, atol=2e-5)
    up = state.params["blocks"]["attention"]["key_up"]
    assert up.addressable_shards[0].data.shape == up.shape  # whole on each


def test_moments_live_beside_their_parameter(tiny):
    config = resolve(tiny())
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = state_shardings(config, mesh)
    state = jax.eval_shape(lambda: new_state(config))
    chex.assert_trees_all_equal_structs(
        jax.tree.map(lambda _: 0, placed), jax.tree.map(lambda _: 0, state)
    )
    rules = placed.opt_state[1].inner_states
    muon, adam = (rules[group].inner_state[0] for group in ("matrix", "embedding"))
    up = muon.momentum["blocks"]["mlp"]["up"]
    assert up == placed.params["blocks"]["mlp"]["up"]
    assert up.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert adam.mu["embedding"]["table"] == placed.params["embedding"]["table"]


@pytest.mark.slow
def test_policies_of_rematerialization_keep_less_and_compute_the_same(tiny):
    policies = ("none", "minimal", "full", "offload")
    deep = ("attention=lrkv", "model.vocabulary=64", "model.layers=6", "train.seq_len=128")
    traces, kept, gradients = {}, {}, {}
    for policy in policies:
        config = resolve(tiny(*deep, f"train.remat={policy}"))
        tokens_BU = np.random.default_rng(0).integers(1, 64, (8, 129)).astype(np.int32)
        with jax.set_mesh(mesh := one_device()):
            gradient = jax.jit(make_gradient(config, mesh, np.ones(64)))
            traces[policy] = gradient.trace(abstract_parameters(config.model), tokens_BU)
        program = traces[policy].lower().compile()
        gradients[policy] = program(random_params(config.model), tokens_BU)
        kept[policy] = program.memory_analysis().temp_size_in_bytes
    for policy in policies[1:]:
        for got, expected in zip(
            jax.tree.leaves(gradients[policy]), jax.tree.leaves(gradients["none"]), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert kept["full"] < kept["minimal"] < kept["none"]
    # A CPU has one memory; a GPU moves what is named to its host's. The log-sum-exp is the
    # chunked attention's, which these short sequences do not take.
    on_gpu = [traces[p].lower(lowering_platforms=("cuda",)).as_text() for p in policies]
    moved = [text.count('"pinned_host"') for text in on_gpu]
    assert moved[:3] == [0, 0, 0] and moved[3] >= len(NAMED) - 1
