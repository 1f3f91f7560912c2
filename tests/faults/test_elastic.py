"""A checkpoint of one mesh is the same bits on any other, and the run goes on in the same order."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.checkpoint.fingerprint import named
from lrkv_jax.config import MeshConfig
from lrkv_jax.run.loop import train
from lrkv_jax.run.metrics import read_metrics
from lrkv_jax.sharding import make_mesh
from lrkv_jax.train.state import abstract_state, checkpoint_items, init_state, resolve

# (data, fsdp, context, tensor) of 1, 2, 4 and 8 devices; each is saved on and restored on the next.
MESHES = [
    (1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 4), (2, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2),
    (1, 2, 2, 2), (1, 1, 1, 1),
]  # fmt: skip


def mesh_of(sizes):
    names = ("data", "fsdp", "context", "tensor")
    devices = jax.devices()[: int(np.prod(sizes))]
    return make_mesh(MeshConfig(**dict(zip(names, sizes, strict=True))), devices)


@pytest.mark.parametrize(
    "variant",
    [pytest.param("mha", marks=pytest.mark.nights), pytest.param("lrkv", marks=pytest.mark.faults)],
)
def test_a_state_passes_through_seven_mesh_changes_without_losing_a_bit(tiny, tmp_path, variant):
    config = resolve(tiny(f"attention={variant}"))
    state = init_state(config, mesh_of(MESHES[0]))
    rng = np.random.default_rng(0)
    items = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)
        if x.dtype == np.float32 else x,
        checkpoint_items(state),
    )  # fmt: skip
    truth = {name: np.asarray(leaf) for name, leaf in named(items).items()}
    prints = []
    for step, sizes in enumerate(MESHES[1:], 1):
        with Checkpointer(tmp_path / "checkpoints") as checkpoints:
            checkpoints.save(step, items, {})
            checkpoints.wait()
            prints.append(checkpoints.manifest(step)["arrays"])
            abstract = checkpoint_items(abstract_state(config, mesh_of(sizes)))
            _, items = checkpoints.restore(abstract, step)
        for name, leaf in named(items).items():
            np.testing.assert_array_equal(np.asarray(leaf), truth[name])
            assert leaf.sharding == named(abstract)[name].sharding
    assert all(other == prints[0] for other in prints), "a fingerprint knows no mesh"


@pytest.mark.slow
def test_a_run_that_changes_its_mesh_keeps_its_order_and_its_losses(tiny, tmp_path):
    quiet = {"console": Console(file=io.StringIO())}
    whole = tiny("attention=mha", "optimizer.muon.iterations=1", f"run_dir={tmp_path / 'whole'}")
    train(whole, devices=jax.devices()[:1], **quiet)
    moving = tiny("attention=mha", "optimizer.muon.iterations=1", f"run_dir={tmp_path / 'moving'}")
    for until, sizes in ((3, (1, 2, 1, 2)), (6, (1, 1, 1, 1))):
        mesh = MeshConfig(**dict(zip(("data", "fsdp", "context", "tensor"), sizes, strict=True)))
        config = moving.model_copy(update={"mesh": mesh})
        train(config, until=until, devices=jax.devices()[: int(np.prod(sizes))], **quiet)
    one, other = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "moving")
    assert [row["step"] for row in other] == [1, 2, 3, 4, 5, 6]
    assert [row["batch"] for row in one] == [row["batch"] for row in other]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in one], [r[name] for r in other], rtol=1e-4)
