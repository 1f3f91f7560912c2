"""Checkpoints come back bit for bit, onto any mesh, and the right ones are kept."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import MeshConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.sharding import make_mesh
from lrkv_jax.train.run_dir import resolve
from lrkv_jax.train.state import (
    abstract_state,
    checkpoint_items,
    from_checkpoint_items,
    init_state,
)

SMALL = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "run": {"step": jnp.int32(1)}}


def shuffled(state):
    """The state with no two values alike, so that a swapped or lost array shows."""
    leaves, tree = jax.tree.flatten(state)

    def fill(index, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(77)
        values = np.random.default_rng(index).normal(size=leaf.shape) * 100
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return tree.unflatten([fill(i, leaf) for i, leaf in enumerate(leaves)])


@pytest.mark.parametrize(
    "target",
    [
        pytest.param((1, 8, 1), marks=pytest.mark.slow),
        pytest.param((4, 1, 2), marks=pytest.mark.slow),
        None,
    ],
)
def test_a_state_restores_onto_another_mesh_bit_for_bit(tiny, tmp_path, target):
    config = resolve(tiny())
    first = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with Checkpointer(tmp_path / "c") as checkpoints:
        state = shuffled(init_state(config, first))
        checkpoints.save(7, checkpoint_items(state), {"tokens": 5})
        checkpoints.wait()
        second = (
            make_mesh(MeshConfig(), jax.devices()[:1])
            if target is None
            else make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), target, strict=True))))
        )
        abstract = abstract_state(config, second)
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
    with Checkpointer(tmp_path / "c", keep=2) as checkpoints:
        for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, None)]:
            checkpoints.save(step, SMALL, {}, loss)
            checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 5]
        assert checkpoints.best() == 2 and checkpoints.latest() == 5


def test_one_item_is_read_without_the_rest(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(1, SMALL, {})
        checkpoints.wait()
        abstract = {"params": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype,
                    sharding=a.sharding), SMALL["params"])}  # fmt: skip
        _, restored = checkpoints.restore(abstract)
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


def test_arrays_of_another_shape_are_an_error_in_one_line(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(1, SMALL, {})
        checkpoints.wait()
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        other = {"params": {"other": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=where)}}
        with pytest.raises(LrkvError, match="cannot be read as this model") as error:
            checkpoints.restore(other)
        assert "\n" not in str(error.value)
