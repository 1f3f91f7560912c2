"""Checkpoints come back bit for bit, onto any mesh, and the right ones are kept."""

import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from lrkv_jax.config import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer, layout
from lrkv_jax.training.checkpointing.checkpointer import read_verified
from lrkv_jax.training.state import (
    abstract_state,
    checkpoint_items,
    from_checkpoint_items,
    resolve,
)

SMALL = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "run": {"step": jnp.int32(1)}}
ABSTRACT = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), SMALL
)


def filled(abstract):
    """A state with no two values alike, so that a swapped or lost array shows."""
    leaves, tree = jax.tree.flatten(abstract)

    def fill(index, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(77)
        values = np.random.default_rng(index).normal(size=leaf.shape) * 100
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return tree.unflatten([fill(i, leaf) for i, leaf in enumerate(leaves)])


def test_a_state_restores_onto_another_mesh_bit_for_bit(tiny, tmp_path):
    config = resolve(tiny())
    first = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with Checkpointer(tmp_path / "c") as checkpoints:
        state = filled(abstract_state(config, first))
        checkpoints.save(7, checkpoint_items(state), {"tokens": 5})
        checkpoints.wait()
        abstract = abstract_state(config, make_mesh(MeshConfig(), jax.devices()[:1]))
        back = from_checkpoint_items(abstract, checkpoints.restore(checkpoint_items(abstract))[1])
    assert jnp.array_equal(jax.random.key_data(back.rng), jax.random.key_data(state.rng))
    for old, new, wanted in zip(
        jax.tree.leaves((state.params, state.opt_state, state.step)),
        jax.tree.leaves((back.params, back.opt_state, back.step)),
        jax.tree.leaves((abstract.params, abstract.opt_state, abstract.step)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
        assert new.sharding == wanted.sharding


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


def test_one_item_is_read_without_the_rest(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(1, SMALL, {})
        checkpoints.wait()
        _, restored = checkpoints.restore({"params": ABSTRACT["params"]})
    assert set(restored) == {"params"}
    chex.assert_trees_all_equal(restored["params"], SMALL["params"])


def test_missing_checkpoints_are_named(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        with pytest.raises(LrkvError, match="no checkpoint under"):
            checkpoints.restore({})
        checkpoints.save(4, SMALL, {})
        checkpoints.wait()
        with pytest.raises(LrkvError, match="no checkpoint of step 3: there are 4"):
            checkpoints.restore({}, 3)


def test_nothing_starts_from_scratch_where_a_step_was_set_aside(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(4, SMALL, {})
        checkpoints.wait()
        layout.set_aside(tmp_path / "c/4")
        with pytest.raises(LrkvError, match="set aside before: 4"):
            checkpoints.restore_newest({})


def test_arrays_of_another_shape_are_an_error_in_one_line(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(1, SMALL, {})
        checkpoints.wait()
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        other = {"params": {"other": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=where)}}
        with pytest.raises(LrkvError, match="cannot be read as this model") as error:
            checkpoints.restore(other)
        assert "\n" not in str(error.value)
