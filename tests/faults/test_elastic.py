"""A checkpoint of one mesh is the same bits on any other.

`tests/training/test_processes.py` trains on from it.
"""

import jax
import numpy as np
import pytest
from support.meshes import mesh_of

from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.checkpointing.fingerprint import named
from lrkv_jax.training.state import abstract_state, checkpoint_items, init_state, resolve

# (data, fsdp, context, tensor) of 1, 2, 4 and 8 devices; each is saved on and restored on the next.
MESHES = [
    (1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 4), (2, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2),
    (1, 2, 2, 2), (1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.faults
def test_a_state_passes_through_seven_mesh_changes_without_losing_a_bit(tiny, tmp_path):
    config = resolve(tiny("attention=lrkv"))
    state = init_state(config, mesh_of(*MESHES[0]))
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
            abstract = checkpoint_items(abstract_state(config, mesh_of(*sizes)))
            _, items = checkpoints.restore(abstract, step)
        for name, leaf in named(items).items():
            np.testing.assert_array_equal(np.asarray(leaf), truth[name])
            assert leaf.sharding == named(abstract)[name].sharding
    assert all(other == prints[0] for other in prints), "a fingerprint knows no mesh"
