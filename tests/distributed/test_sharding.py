"""The mesh takes all devices or says why not; each axis lands where the table says."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from lrkv_jax.config import MeshConfig, load_config
from lrkv_jax.distributed.mesh import check_mesh, make_mesh
from lrkv_jax.distributed.rules import parameter_shardings
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.transformer import abstract_parameters, specs


def mesh_of(data, fsdp, context, tensor):
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor))


def placed(mesh, *overrides):
    config = load_config("configs/quickstart.yaml", overrides)
    shapes = abstract_parameters(config.model)
    return jax.tree.map(
        lambda sharding: sharding.spec, parameter_shardings(specs(config.model), shapes, mesh)
    )


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((1, -1, 1, 1), (1, 8, 1, 1)),
        ((2, 2, 1, 2), (2, 2, 1, 2)),
        ((-1, 1, 1, 4), (2, 1, 1, 4)),
        ((1, 2, -1, 1), (1, 2, 4, 1)),
    ],
)
def test_one_axis_takes_what_is_left(sizes, shape):
    mesh = mesh_of(*sizes)
    assert tuple(mesh.shape.values()) == shape
    assert tuple(mesh.shape) == ("data", "fsdp", "context", "tensor")


@pytest.mark.parametrize(
    "sizes", [(3, 1, 1, 1), (1, 1, 1, 1), (16, -1, 1, 1), (3, -1, 1, 1), (2, 2, 1, 4), (2, 2, 3, 1)]
)
def test_sizes_that_do_not_multiply_to_the_devices_are_refused(sizes):
    with pytest.raises(
        LrkvError, match="must multiply to the number of devices, 8: set one of them to -1"
    ):
        mesh_of(*sizes)


def test_heads_are_split_over_tensor_and_the_width_over_fsdp():
    mesh = mesh_of(2, 2, 1, 2)
    tree = placed(mesh, "attention=mha")
    attention = tree["blocks"]["attention"]
    assert attention["query"] == P(None, "fsdp", "tensor", None)
    assert attention["key"] == P(None, "fsdp", "tensor", None)
    assert attention["output"] == P(None, "tensor", None, "fsdp")
    assert tree["blocks"]["mlp"] == {
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    }
    assert tree["embedding"]["table"] == P("tensor", "fsdp")
    assert tree["head"]["kernel"] == P("fsdp", "tensor")


def test_shared_keys_are_whole_on_every_tensor_shard():
    mesh = mesh_of(2, 2, 1, 2)
    mqa = placed(mesh, "attention=mqa")["blocks"]["attention"]
    assert mqa["key"] == P(None, "fsdp", None, None)
    lrkv = placed(mesh, "attention=lrkv")["blocks"]["attention"]
    assert lrkv["key"] == P(None, "fsdp", None)
    assert lrkv["key_down"] == P(None, "tensor", "fsdp", None)
    assert lrkv["key_up"] == P(None, "tensor", None, None)
    mla = placed(mesh, "attention=mla")["blocks"]["attention"]
    assert mla["down"] == P(None, "fsdp", None)
    assert mla["up_key"] == P(None, None, "tensor", None)


@pytest.mark.parametrize(
    ("sizes", "overrides", "message"),
    [
        (
            (1, 1, 1, 8),
            (),
            r"mesh.tensor = 8 does not divide model.heads = 4: use one of 1, 2, 4",
        ),
        ((1, 8, 1, 1), ("model.width=132",), "mesh.fsdp = 8 does not divide model.width = 132"),
        (
            (8, 1, 1, 1),
            ("train.global_batch_size=12",),
            "mesh.data x mesh.fsdp = 8 does not divide",
        ),
        (
            (2, 4, 1, 1),
            ("train.grad_accum_steps=2",),
            "/ train.grad_accum_steps = 4: set train.grad_accum_steps=1",
        ),
        (
            (2, 4, 1, 1),
            ("train.global_batch_size=4",),
            "/ train.grad_accum_steps = 4: set train.global_batch_size=8, or use",
        ),
        (
            (1, 4, 2, 1),
            ("train.seq_len=33",),
            "mesh.context = 2 does not divide train.seq_len = 33: use one of 1, 3, 11, 33",
        ),
        ((1, 1, 8, 1), (), "mesh.context = 8 does not divide model.heads = 4: use one of 1, 2, 4"),
        (
            (1, 1, 4, 2),
            (),
            "mesh.context = 4 does not divide model.heads / mesh.tensor = 2: use one of 1, 2",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(sizes, overrides, message):
    with pytest.raises(LrkvError, match=message):
        check_mesh(load_config("configs/quickstart.yaml", overrides), mesh_of(*sizes))
