"""The mesh takes all devices or says why not; each axis lands where the table says."""

import pytest
from jax.sharding import PartitionSpec as P

from lrkv_jax.config import MeshConfig, load_config
from lrkv_jax.distributed.mesh import check_mesh, make_mesh
from lrkv_jax.distributed.rules import parameter_shardings
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.transformer import abstract_parameters, specs


def mesh_of(data, fsdp, context, tensor):
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor))


@pytest.mark.parametrize(
    ("sizes", "shape"), [((1, -1, 1, 1), (1, 8, 1, 1)), ((2, 2, 1, 2), (2, 2, 1, 2))]
)
def test_one_axis_takes_what_is_left(sizes, shape):
    mesh = mesh_of(*sizes)
    assert tuple(mesh.shape.values()) == shape
    assert tuple(mesh.shape) == ("data", "fsdp", "context", "tensor")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, -1, 1, 1), (2, 2, 1, 4)])
def test_sizes_that_do_not_multiply_to_the_devices_are_refused(sizes):
    message = "must multiply to the number of devices, 8: set one of them to -1"
    with pytest.raises(LrkvError, match=message):
        mesh_of(*sizes)


# Heads over tensor and the width over fsdp; what all heads share is whole on every tensor shard.
PLACES = {
    "mha": {
        "attention.query": P(None, "fsdp", "tensor", None),
        "attention.key": P(None, "fsdp", "tensor", None),
        "attention.output": P(None, "tensor", None, "fsdp"),
        "mlp.up": P(None, "fsdp", "tensor"),
        "mlp.down": P(None, "tensor", "fsdp"),
        "embedding.table": P("tensor", "fsdp"),
        "head.kernel": P("fsdp", "tensor"),
    },
    "mqa": {"attention.key": P(None, "fsdp", None, None)},
    "lrkv": {
        "attention.key": P(None, "fsdp", None),
        "attention.key_down": P(None, "tensor", "fsdp", None),
        "attention.key_up": P(None, "tensor", None, None),
    },
    "mla": {
        "attention.down": P(None, "fsdp", None),
        "attention.up_key": P(None, None, "tensor", None),
    },
}


@pytest.mark.parametrize("variant", PLACES)
def test_each_axis_of_a_parameter_is_split_as_the_table_says(variant):
    model = load_config("quickstart", [f"attention={variant}"]).model
    tree = parameter_shardings(specs(model), abstract_parameters(model), mesh_of(2, 2, 1, 2))
    tree |= tree.pop("blocks")
    for name, place in PLACES[variant].items():
        part, _, weight = name.partition(".")
        assert tree[part][weight].spec == place, name


@pytest.mark.parametrize(
    ("sizes", "override", "message"),
    [
        ((1, 1, 1, 8), None, "mesh.tensor = 8 does not divide model.heads = 4: use one of 1, 2, 4"),
        ((1, 8, 1, 1), "model.width=132", "mesh.fsdp = 8 does not divide model.width = 132"),
        ((8, 1, 1, 1), "train.global_batch_size=12", "mesh.data x mesh.fsdp = 8 does not divide"),
        ((2, 4, 1, 1), "train.global_batch_size=4", "= 4: set train.global_batch_size=8, or use"),
        ((1, 4, 2, 1), "train.seq_len=33", "does not divide train.seq_len = 33: use one of 1, 3, "),
        ((1, 1, 8, 1), None, "mesh.context = 8 does not divide model.heads / mesh.tensor = 4: use"),
    ],
)
def test_what_cannot_be_split_is_refused(sizes, override, message):
    config = load_config("quickstart", [override] if override else [])
    with pytest.raises(LrkvError, match=message):
        check_mesh(config, mesh_of(*sizes))
    if "model." not in message.replace("model.heads / mesh", ""):
        return  # a batch
    plain = load_config("quickstart", ["model.heads=8", "model.head_width=16"])
    train = plain.train.model_copy(update={"teacher_model": config.model})
    message = message.replace("model.", "train.teacher's model.")
    with pytest.raises(LrkvError, match=message):
        check_mesh(plain.model_copy(update={"train": train}), mesh_of(*sizes))
