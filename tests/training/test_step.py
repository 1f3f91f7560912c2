"""One step, which consumes its state, is the same whatever the mesh, towards a teacher too."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.meshes import mesh_of
from support.variants import random_params

from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.models.attention import GQA
from lrkv_jax.models.remat import NAMED
from lrkv_jax.models.transformer import abstract_parameters, with_parameters
from lrkv_jax.training.loss import make_gradient
from lrkv_jax.training.state import init_state, resolve, state_shardings
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
    with jax.set_mesh(alone := mesh_of()):
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent", "hybrid"])
def test_twenty_steps_agree_with_one_device_on_every_mesh(tiny, variant):
    """LRKV on all of these meshes, the others on one that splits by every axis but data.

    MLA has latents of single heads, which tensor splits, beside the common one; GQA is in the block
    of pretrained models, and the mode latent makes way for the norm over the heads of all shards.
    The hybrid has windows that reach over the positions of two devices, in GQA, and LRKV unrotated.
    tests/training/test_processes.py has meshes of data or tensor alone.
    """
    pretrained = ["model.gated=true", "model.qk_gain=true", "model.qkv_bias=true"]
    joint = ["attention.rope=shared", "attention.latent_norm=joint"]
    hybrid = [
        "attention=lrkv", "attention.rope=none", "model.layers_pattern=SG", "model.window=20",
        "model.window_attention=gqa",
    ]  # fmt: skip
    own = {"mla": ["attention.rank=2"], "gqa": pretrained, "lrkv_latent": joint}
    chosen = hybrid if variant == "hybrid" else [f"attention={variant}", *own.get(variant, ())]
    config = resolve(tiny(*LONG, *chosen))
    alone, _ = losses(config, mesh_of(), 20)
    assert alone[0, 0] - alone[-1, 0] > 0.2
    for name in MESHES if variant == "lrkv" else ("1x2x2x2",):
        meshed, state = losses(config, mesh_of(**MESHES[name]), 20)
        # Float32 sums in another order; the losses are about ln 64 = 4.2.
        np.testing.assert_allclose(meshed[:5], alone[:5], rtol=2e-5, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(meshed[:, 0], alone[:, 0], rtol=1e-4, err_msg=name)
    blocks = state.params["blocks"]  # on 1x2x2x2
    for block in blocks.values() if variant == "hybrid" else [blocks]:
        query = block["attention"]["query"]
        assert query.sharding.spec[1:3] == ("fsdp", "tensor")
        assert query.addressable_shards[0].data.size == query.size // 4


@pytest.mark.slow
def test_a_residual_may_serve_heads_of_several_tensor_shards(tiny):
    """Two groups of two heads over four tensor shards: each takes its own heads' residual."""
    config = resolve(tiny("attention=lrkv", "attention.kv_heads=2", "model.vocabulary=64"))
    alone, _ = losses(config, mesh_of(), 3)
    meshed, state = losses(config, mesh_of(data=2, tensor=4), 3)
    np.testing.assert_allclose(meshed, alone, rtol=2e-5, atol=2e-5)
    up = state.params["blocks"]["attention"]["key_up"]
    assert up.addressable_shards[0].data.shape == up.shape  # whole on each


@pytest.mark.slow
def test_policies_of_rematerialization_keep_less_and_compute_the_same(tiny):
    policies = ("none", "minimal", "full", "offload")
    deep = ("attention=lrkv", "model.vocabulary=64", "model.layers=6", "train.seq_len=128")
    traces, kept, gradients = {}, {}, {}
    for policy in policies:
        config = resolve(tiny(*deep, f"train.remat={policy}"))
        tokens_BU = np.random.default_rng(0).integers(1, 64, (8, 129)).astype(np.int32)
        with jax.set_mesh(mesh := mesh_of()):
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


LEARN = ("key", "key_down", "key_up", "value", "value_down", "value_up")


def taught(config, model, **changes):
    train = config.train.model_copy(update={"teacher_model": model, **changes})
    return config.model_copy(update={"train": train})


def one_step(config, params, teacher, tokens, **sizes):
    """The state after a step from `params`, and its metrics, on a mesh of these sizes."""
    with jax.set_mesh(mesh := mesh_of(**sizes)):
        state = init_state(config, mesh)
        where = state_shardings(config, mesh)
        placed = jax.device_put((params, teacher), (where.params, where.teacher))
        state = replace(state, params=placed[0], teacher=placed[1])
        step = make_train_step(config, mesh, np.ones(config.model.vocabulary, np.int32))
        after, metrics = step(state, jax.device_put(tokens, batch_sharding(mesh)))
        return jax.tree.map(np.asarray, (after.params, after.teacher)), jax.device_get(metrics)


@pytest.fixture
def case(tiny):
    config = resolve(tiny("attention=lrkv", "model.vocabulary=64", "model.layers=1"))
    model = config.model.model_copy(update={"attention": GQA(kv_heads=2), "softcap": 7.0})
    params, teacher = (jax.tree.map(np.asarray, random_params(m)) for m in (config.model, model))
    shape = config.train.global_batch_size, config.train.seq_len + 1
    return config, model, params, teacher, np.random.default_rng(0).integers(0, 64, shape)


@pytest.mark.slow
def test_the_loss_is_the_divergence_from_the_teacher_and_only_keys_and_values_learn(case):
    config, model, params, teacher, tokens_BU = case
    config = taught(config, model, trainable="keys_and_values")
    (after, same), metrics = one_step(config, params, teacher, tokens_BU)
    logits = [
        np.float64(jax.jit(with_parameters(m, jax.device_put(p)))(tokens_BU[:, :-1]))
        for m, p in ((config.model, params), (model, teacher))
    ]
    log_p, log_q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in logits)
    truth = (np.exp(log_q) * (log_q - log_p)).sum(-1).mean()
    assert metrics["loss"] == pytest.approx(truth, rel=1e-5)
    nll = -np.take_along_axis(log_p, tokens_BU[:, 1:, None], axis=-1).mean()
    assert metrics["bpb"] == pytest.approx(nll / np.log(2), rel=1e-5)  # every token is a byte
    jax.tree.map(np.testing.assert_array_equal, same, jax.tree.map(np.asarray, teacher))
    for path, leaf in jax.tree.leaves_with_path(after):
        before = np.asarray(dict(jax.tree.leaves_with_path(params))[path])
        learns = path[-2].key == "attention" and path[-1].key in LEARN
        assert (leaf == before).all() != learns, path


@pytest.mark.slow
def test_a_taught_step_of_two_microbatches_is_the_same_on_a_mesh(case):
    config, model, params, teacher, tokens_BU = case
    _, whole = one_step(taught(config, model), params, teacher, tokens_BU)
    config = taught(config, model, grad_accum_steps=2)
    (alone, _), metrics = one_step(config, params, teacher, tokens_BU)
    sizes = MESHES["1x2x2x2"]
    (meshed, _), others = one_step(config, params, teacher, tokens_BU, **sizes)
    for name in ("loss", "grad_norm", "bpb"):
        assert others[name] == pytest.approx(metrics[name], rel=2e-5), name
        assert metrics[name] == pytest.approx(whole[name], rel=2e-5), name
    # Muon turns a gradient's rounding into a direction: what is small there moves little.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), meshed, alone)
