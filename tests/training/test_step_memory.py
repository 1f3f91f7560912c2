"""What a step keeps: rematerialization changes memory alone; logits never exist whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.models.remat import NAMED
from lrkv_jax.models.transformer import abstract_parameters, init_parameters, with_parameters
from lrkv_jax.training.loss import make_gradient
from lrkv_jax.training.state import resolve

POLICIES = ("none", "minimal", "full", "offload")


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def nonzero(params):
    """Output projections and the head start at zero, and would hide what is behind them."""
    return jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)


def tokens_of(config):
    shape = (config.train.global_batch_size, config.train.seq_len + 1)
    rng = np.random.default_rng(0)
    return rng.integers(1, config.model.vocabulary, shape).astype(np.int32)


def traced(config):
    mesh = one_device()
    with jax.set_mesh(mesh):
        gradient = make_gradient(config, mesh, np.ones(config.model.vocabulary))
        shapes = abstract_parameters(config.model)
        batch = jax.ShapeDtypeStruct(tokens_of(config).shape, np.int32)
        return jax.jit(gradient).trace(shapes, batch)


@pytest.mark.slow
def test_policies_keep_less_and_compute_the_same(tiny):
    deep = ("attention=lrkv", "model.vocabulary=64", "model.layers=6", "train.seq_len=128")
    traces, programs, gradients = {}, {}, {}
    for policy in POLICIES:
        config = resolve(tiny(*deep, f"train.remat={policy}"))
        traces[policy] = traced(config)
        programs[policy] = traces[policy].lower().compile()
        params = nonzero(init_parameters(config.model, 0))
        gradients[policy] = programs[policy](params, tokens_of(config))
    for policy in POLICIES[1:]:
        for got, expected in zip(
            jax.tree.leaves(gradients[policy]), jax.tree.leaves(gradients["none"]), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    kept = {
        policy: program.memory_analysis().temp_size_in_bytes for policy, program in programs.items()
    }
    assert kept["full"] < kept["minimal"] < kept["none"]
    # A CPU has one memory; a GPU moves what is named to its host's. The log-sum-exp is the
    # chunked attention's, which these short sequences do not take.
    on_gpu = [traces[p].lower(lowering_platforms=("cuda",)).as_text() for p in POLICIES]
    moved = [text.count('"pinned_host"') for text in on_gpu]
    assert moved[:3] == [0, 0, 0] and moved[3] >= len(NAMED) - 1


@pytest.mark.slow
def test_the_fused_loss_saves_at_least_the_logits(tiny):
    """Beside a plain loss, the peak falls by B · T · V float32 numbers or more."""
    config = resolve(tiny("attention=mha", "model.vocabulary=2048", "train.loss_chunk=32"))

    def plain(params, tokens_BU):
        logits_BTV = with_parameters(config.model, params)(tokens_BU[:, :-1])
        nll_BT = -jax.nn.log_softmax(logits_BTV)
        return jnp.take_along_axis(nll_BT, tokens_BU[:, 1:, None], axis=-1).mean()

    mesh, batch = one_device(), tokens_of(config)
    params = nonzero(init_parameters(config.model, 0))
    with jax.set_mesh(mesh):
        whole = jax.jit(jax.value_and_grad(plain)).lower(params, batch).compile()
    fused = traced(config).lower().compile()
    logits = 4 * config.train.global_batch_size * config.train.seq_len * config.model.vocabulary
    saved = [program.memory_analysis().temp_size_in_bytes for program in (whole, fused)]
    assert saved[0] - saved[1] >= logits
    (loss, *_), gradients = fused(params, batch)
    expected_loss, expected = whole(params, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for got, truth in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, truth, rtol=1e-4, atol=1e-6)
