"""Checkpoints come back bit for bit, onto any mesh, and the right ones are kept."""

import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer, layout
from lrkv_jax.training.checkpointing.checkpointer import read_verified
from lrkv_jax.training.state import checkpoint_items, from_checkpoint_items, new_state, resolve

ONE_DEVICE = SingleDeviceSharding(jax.devices()[0])

SMALL = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "run": {"step": jnp.int32(1)}}
ABSTRACT = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), SMALL
)


def test_a_checkpoint_restores_onto_another_mesh_bit_for_bit(tmp_path):
    """tests/faults/test_elastic.py takes a whole state through seven meshes."""
    w = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = jax.device_put(w, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    one = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=ONE_DEVICE)
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(7, {"params": {"w": split}}, {"tokens": 5})
        checkpoints.wait()
        _, back = checkpoints.restore({"params": {"w": one}})
    np.testing.assert_array_equal(back["params"]["w"], w)
    assert back["params"]["w"].sharding == ONE_DEVICE


def test_a_state_is_made_of_its_items_again(tiny):
    abstract = jax.eval_shape(lambda: new_state(resolve(tiny())))
    numbers = iter(range(1000))

    def fill(leaf):
        """No two leaves alike, so that a swapped or lost one shows."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(77)
        return np.full(leaf.shape, next(numbers), leaf.dtype)

    state = jax.tree.map(fill, abstract)
    back = from_checkpoint_items(abstract, checkpoint_items(state))
    assert jnp.array_equal(jax.random.key_data(back.rng), jax.random.key_data(state.rng))
    for part in ("params", "opt_state", "step", "guard"):
        chex.assert_trees_all_equal(getattr(back, part), getattr(state, part))


def test_the_newest_and_the_best_are_kept(tmp_path):
    """A21: a validation loss of NaN, once the first of those kept, stayed the best for ever."""
    losses = [float("nan"), 1.0, 3.0, 2.5, None]
    with Checkpointer(tmp_path / "c", max_to_keep=2) as checkpoints:
        for step, loss in enumerate(losses, 1):
            checkpoints.save(step, SMALL, {}, loss)
            checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 5]
        assert checkpoints.best() == 2 and checkpoints.latest() == 5


def test_a_step_that_a_training_run_deletes_meanwhile_is_not_damage(tmp_path, monkeypatch):
    """A21."""
    with Checkpointer(tmp_path / "c", warn=pytest.fail) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, SMALL, {})
        checkpoints.wait()

        def late(path, abstract, processes):
            if path.name == "2":
                layout.delete(path)
            return read_verified(path, abstract, processes)

        monkeypatch.setattr("lrkv_jax.training.checkpointing.checkpointer.read_verified", late)
        assert checkpoints.restore_newest(ABSTRACT)[0] == 1


def test_what_a_failed_save_goes_on_writing_is_removed(tmp_path, monkeypatch):
    """A21: on a full disk, Orbax's threads write on when the save has failed; it was left there."""

    def full(path, items):
        raise OSError(28, "No space left on device")

    directory, save = tmp_path / "c", ocp.save_checkpointables_async
    late = directory / ".saving-1.orbax-checkpoint-tmp" / "params"
    with Checkpointer(directory, warn=lambda text: None) as checkpoints:
        monkeypatch.setattr(ocp, "save_checkpointables_async", full)
        checkpoints.save(1, SMALL, {})
        late.mkdir(parents=True)
        monkeypatch.setattr(ocp, "save_checkpointables_async", save)
        checkpoints.save(2, SMALL, {})
        checkpoints.wait()
        assert os.listdir(directory) == ["2"]
        late.mkdir(parents=True)
    assert os.listdir(directory) == ["2"] and checkpoints.failures == 1


def test_one_item_is_read_alone_and_what_is_not_there_or_is_another_model_s_is_one_line(tmp_path):
    other = {"params": {"other": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=ONE_DEVICE)}}
    with Checkpointer(tmp_path / "c") as checkpoints:
        with pytest.raises(LrkvError, match="no checkpoint under"):
            checkpoints.restore({})
        checkpoints.save(4, SMALL, {})
        checkpoints.wait()
        _, restored = checkpoints.restore({"params": ABSTRACT["params"]})
        chex.assert_trees_all_equal(restored, {"params": SMALL["params"]})
        with pytest.raises(LrkvError, match="no checkpoint of step 3: there are 4"):
            checkpoints.restore({}, 3)
        with pytest.raises(LrkvError, match="cannot be read as this model") as error:
            checkpoints.restore(other)
        assert "\n" not in str(error.value)
        layout.set_aside(tmp_path / "c/4")
        with pytest.raises(LrkvError, match="set aside before: 4"):
            checkpoints.restore_newest({})  # nothing starts from scratch there
