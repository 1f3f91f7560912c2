"""A step towards another model's distributions: its loss, its mesh, and what stands still."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.variants import random_params

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.models.attention import GQA
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.state import init_state, resolve, state_shardings
from lrkv_jax.training.step import make_train_step

LEARN = ("key", "key_down", "key_up", "value", "value_down", "value_up")


def taught(config, model, **changes):
    train = config.train.model_copy(update={"teacher_model": model, **changes})
    return config.model_copy(update={"train": train})


def one_step(config, params, teacher, tokens, sizes=None):
    """The state after a step from `params`, and its metrics, on a mesh of these sizes."""
    devices = None if sizes else jax.devices()[:1]
    mesh = make_mesh(MeshConfig(**(sizes or {"data": 1, "fsdp": 1})), devices)
    with jax.set_mesh(mesh):
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
    config = taught(config, model, grad_accum_steps=2)
    (alone, _), metrics = one_step(config, params, teacher, tokens_BU)
    sizes = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    (meshed, _), others = one_step(config, params, teacher, tokens_BU, sizes)
    for name in ("loss", "grad_norm", "bpb"):
        assert others[name] == pytest.approx(metrics[name], rel=2e-5), name
    # Muon turns a gradient's rounding into a direction: what is small there moves little.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), meshed, alone)
