"""What a step keeps: rematerialization changes memory alone."""

import jax
import numpy as np
import pytest
from support.variants import random_params

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.models.remat import NAMED
from lrkv_jax.models.transformer import abstract_parameters
from lrkv_jax.training.loss import make_gradient
from lrkv_jax.training.state import resolve

POLICIES = ("none", "minimal", "full", "offload")


@pytest.mark.slow
def test_policies_keep_less_and_compute_the_same(tiny):
    deep = ("attention=lrkv", "model.vocabulary=64", "model.layers=6", "train.seq_len=128")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    traces, kept, gradients = {}, {}, {}
    for policy in POLICIES:
        config = resolve(tiny(*deep, f"train.remat={policy}"))
        tokens_BU = np.random.default_rng(0).integers(1, 64, (8, 129)).astype(np.int32)
        with jax.set_mesh(mesh):
            gradient = jax.jit(make_gradient(config, mesh, np.ones(64)))
            traces[policy] = gradient.trace(abstract_parameters(config.model), tokens_BU)
        program = traces[policy].lower().compile()
        gradients[policy] = program(random_params(config.model), tokens_BU)
        kept[policy] = program.memory_analysis().temp_size_in_bytes
    for policy in POLICIES[1:]:
        for got, expected in zip(
            jax.tree.leaves(gradients[policy]), jax.tree.leaves(gradients["none"]), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert kept["full"] < kept["minimal"] < kept["none"]
    # A CPU has one memory; a GPU moves what is named to its host's. The log-sum-exp is the
    # chunked attention's, which these short sequences do not take.
    on_gpu = [traces[p].lower(lowering_platforms=("cuda",)).as_text() for p in POLICIES]
    moved = [text.count('"pinned_host"') for text in on_gpu]
    assert moved[:3] == [0, 0, 0] and moved[3] >= len(NAMED) - 1
