"""What a rematerialized layer keeps of cuDNN's attention; traced as if an H200 were here."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support.jaxprs import equations

from lrkv_jax.kernels.flash import cudnn
from lrkv_jax.models.remat import CUDNN_FORWARD, rematerialized

beneath = cudnn._beneath


@pytest.fixture
def h200(monkeypatch):
    version = SimpleNamespace(cudnn_get_version=lambda: 91800)
    monkeypatch.setattr(beneath, "cuda_versions", version)
    monkeypatch.setattr(beneath, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(beneath, "is_cuda_compute_capability_equal", lambda c: c == "9.0")
    monkeypatch.setattr(cudnn, "gpu", lambda: cudnn.Gpu((9, 0), 91800))


@pytest.mark.parametrize(
    ("remat", "runs"), [("none", 1), ("minimal", 1), ("offload", 1), ("full", 2)]
)
def test_cudnn_runs_once_unless_the_whole_layer_is_computed_again(h200, remat, runs):
    key, value = 192, 128

    def layer(x_BTHK):
        # Something on either side that a policy may compute again.
        q_BTHK = jnp.sin(x_BTHK)
        out_BTHW = cudnn.causal_attention(
            q_BTHK, 2 * q_BTHK, q_BTHK[..., :value], scale=0.1, segments_BT=None
        )
        return jnp.cos(out_BTHW).sum()

    x_BTHK = jax.ShapeDtypeStruct((2, 128, 4, key), jnp.bfloat16)
    traced = jax.make_jaxpr(jax.grad(rematerialized(layer, remat, unrolled=False)))(x_BTHK)
    names = [equation.primitive.name for equation in equations(traced.jaxpr)]
    assert names.count(CUDNN_FORWARD) == runs
    assert names.count(CUDNN_FORWARD.replace("fwd", "bwd")) == 1
