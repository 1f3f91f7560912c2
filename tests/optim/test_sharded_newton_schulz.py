"""Newton–Schulz spread over a mesh gives what one device gives, whatever lies where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import partition
from lrkv_jax.models.weights import WeightSpec
from lrkv_jax.optim import global_norm, scale_by_muon

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
    "none": ("heads: rank -> head_width", (5, 4, 0, 8)),
}
SPECS = {name: WeightSpec.parse(layout).stacked() for name, (layout, _) in WEIGHTS.items()}


def gradients():
    rng = np.random.default_rng(3)
    return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, (_, s) in WEIGHTS.items()}


def on_mesh(f, sizes, tree):
    """f(tree), jitted, with the tree placed as a training step places it."""
    config = MeshConfig(**dict(zip(("data", "fsdp", "context", "tensor"), sizes, strict=True)))
    mesh = make_mesh(config, jax.devices()[: int(np.prod(sizes))])
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, partition(SPECS[name].axes, x.shape, mesh)))
        for name, x in tree.items()
    }
    with jax.set_mesh(mesh):
        return jax.jit(f)(placed)


def updates(dtype):
    muon = scale_by_muon(SPECS, iterations=1, dtype=dtype)
    return lambda tree: muon.update(tree, muon.init(tree))[0]


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", (1, 2, 2, 2)),
        pytest.param("float32", (1, 8, 1, 1), marks=pytest.mark.slow),
        pytest.param("bfloat16", (2, 2, 1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mesh_gives_one_devices_update(dtype, sizes):
    got = on_mesh(updates(dtype), sizes, gradients())
    # The norms' sums differ in their last bit, and bfloat16 then rounds an entry here and there to
    # its neighbor, 2⁻⁸ away; the iteration multiplies that by up to 3.4.
    rounding = 3.5 * 2.0**-8 if dtype == "bfloat16" else 3e-6
    for name, truth in jax.jit(updates(dtype))(gradients()).items():
        np.testing.assert_allclose(got[name], truth, atol=rounding, err_msg=name)


def test_the_global_norm_counts_every_number_once():
    tree = gradients()
    truth = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in tree.values()))
    got = on_mesh(lambda tree: global_norm(tree, SPECS), (2, 2, 1, 2), tree)
    np.testing.assert_allclose(got, truth, rtol=1e-6)
