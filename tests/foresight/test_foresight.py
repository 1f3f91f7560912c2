"""A step foreseen on a mesh: its state against live arrays, messages and memory by their laws."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from support.tiny import TINY

from lrkv_jax.accounting.muon import muon_flops, muon_flops_per_device
from lrkv_jax.config import MeshConfig, load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.foresight import fit
from lrkv_jax.foresight.fit import changes, check_memory, verdict
from lrkv_jax.foresight.step import matrices, memory, messages, resolved, state_bytes
from lrkv_jax.model import abstract_parameters
from lrkv_jax.sharding import make_mesh
from lrkv_jax.train.state import abstract_state

MESHES = {
    "fsdp8": {"fsdp": 8},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp2-context2-tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
}


def configured(*overrides, fsdp=1, **sizes):
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": fsdp, **sizes}.items()]
    return load_config("configs/quickstart.yaml", [*TINY, *mesh, *overrides])


def on_first_device(tree):
    """Bytes of a tree's arrays on device 0, scalars left out."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim
        for shard in leaf.addressable_shards
        if shard.device == first
    )


@pytest.mark.parametrize(
    ("mesh", "variant", "moments"),
    [
        ("fsdp8", "mla", "float32"),
        ("data2-fsdp2-tensor2", "lrkv", "bfloat16"),
        ("fsdp2-context2-tensor2", "gqa", "float32"),
    ],
)
def test_state_is_what_live_arrays_hold(mesh, variant, moments):
    config = configured(
        f"attention={variant}", f"optimizer.moments_dtype={moments}", "model.norm_gain=true",
        **MESHES[mesh],
    )  # fmt: skip
    # Zeros, put where the step's state lies: making a real state would compile its initialisation.
    abstract = abstract_state(config, make_mesh(config.mesh))
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        {"params": abstract.params, "opt_state": abstract.opt_state},
    )
    counted = state_bytes(config)
    assert counted["parameters"] == on_first_device(state["params"])
    assert counted["optimizer"] == on_first_device(state["opt_state"])
    assert counted["gradients"] == counted["parameters"]  # both float32, beside each other


def total(found, **what):
    picked = [m for m in found if all(getattr(m, name) == v for name, v in what.items())]
    return sum(m.bytes for m in picked)


def test_weights_are_gathered_twice_in_bfloat16_and_gradients_scattered_once_in_float32():
    config = configured("attention=lrkv", fsdp=8)
    found = messages(config)
    specs_size = split_weights(config)
    gathered, scattered = specs_size["layers"] * 2 + specs_size["head"], sum(specs_size.values())
    # Each of 8 sends its eighth to 7 others; the tokens of the lookup are gathered too.
    tokens = 7 * (8 // 8) * 32 * 4
    everyone = total(found, kind="all-gather", part="gradient")
    assert everyone == gathered * 2 * 7 / 8 + tokens
    assert total(found, kind="reduce-scatter") == scattered * 4 * 7 / 8
    # There and back: the stream's B · T · D, float32 as the table is.
    assert total(found, kind="all-to-all", part="gradient") == 2 * 1 * 32 * 32 * 4 * 7 / 8


def split_weights(config):
    """Elements of the weights that fsdp splits: of the layers, and of the head."""
    tree = abstract_parameters(config.model)
    layers = {n: w for part in ("attention", "mlp") for n, w in tree["blocks"][part].items()}
    whole = ("key_up", "value_up")
    return {
        "layers": sum(math.prod(w.shape) for n, w in layers.items() if n not in whole),
        "head": math.prod(tree["head"]["kernel"].shape),
    }


@pytest.mark.slow
def test_microbatches_gather_again_and_do_not_send_more_for_muon():
    once, twice = (
        messages(configured("attention=mha", f"train.accumulation={n}", fsdp=4)) for n in (1, 2)
    )
    for kind in ("all-gather", "reduce-scatter"):
        tokens = 3 * 2 * 32 * 4 if kind == "all-gather" else 0  # the same tokens in all
        assert total(twice, kind=kind, part="gradient") - tokens == 2 * (
            total(once, kind=kind, part="gradient") - tokens
        )
    assert total(once, part="muon") == total(twice, part="muon") > 0


def test_one_device_sends_nothing():
    assert messages(configured("attention=mha")) == []


def test_muon_is_shared_out_whole_and_no_device_repeats_work():
    config = configured("attention=mha", "model.layers=3", fsdp=8)
    groups = matrices(config.model, {"data": 1, "fsdp": 8, "context": 1, "tensor": 1})
    # Queries, keys, values and outputs are one group of 12; both MLP matrices one of 6.
    assert sorted((g.rows, g.columns, g.count) for g in groups) == [(32, 32, 12), (32, 128, 6)]
    busiest, everything = muon_flops_per_device(groups, 5, 8), muon_flops(groups, 5)
    one = {(g.rows, g.columns): muon_flops([g], 5) // g.count for g in groups}
    assert busiest == 2 * one[32, 32] + one[32, 128]  # 12 over 8 is 2 at most, 6 over 8 is 1
    assert everything / 8 <= busiest < everything


@pytest.mark.slow
def test_policies_keep_less_and_need_less():
    held = {p: memory(configured("attention=lrkv", f"train.remat={p}", fsdp=8))
            for p in ("none", "minimal", "full", "offload")}  # fmt: skip
    kept = [held[p].kept for p in ("none", "minimal", "full")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    # One row of 32 positions of width 32, in bfloat16, for each of two layers: a layer's input.
    inputs = 2 * 32 * 32 * 2
    assert inputs <= held["full"].kept < 1.5 * inputs
    # What is offloaded lies in the host's memory; the rest is kept as under `full`.
    assert held["offload"].kept == held["full"].kept
    peaks = [held[p].peak for p in ("none", "minimal", "full")]
    assert peaks == sorted(peaks, reverse=True)
    for one in held.values():
        assert sum(one.at_peak.values()) == one.peak
        assert one.transient > 0


def test_a_tensor_shard_holds_its_share_of_what_is_split():
    """Twice the heads, MLP and vocabulary over two tensor shards: the same arrays on each."""
    half = configured("attention=mha", "model.layers=2")
    sizes = ("model.heads=8", "model.feed_forward=256", "model.vocabulary=8192")
    both = configured("attention=mha", *sizes, tensor=2)
    assert memory(both).kept == memory(half).kept
    assert state_bytes(both) == state_bytes(half)


# Verdicts.


def test_a_device_that_is_too_small_is_named_with_what_would_fit_and_is_tried():
    """A16: a forecast that was never measured on a GPU refused every start. It warns."""
    long = ("attention=mha", "train.context=256")  # what is kept outweighs the plan's error
    config = configured(*long, fsdp=8)
    minimal = configured(*long, "train.remat=minimal", fsdp=8)
    needs, then = memory(config).peak, memory(minimal).peak
    mesh = AbstractMesh((1, 8, 1, 1), ("data", "fsdp", "context", "tensor"))
    assert check_memory(config, mesh, needs) is None
    line = check_memory(config, mesh, then)
    assert line.startswith("each of the 8 devices (mesh.fsdp=8) needs 0.0")
    assert "GB too little: train.remat=minimal would fit, with 0.0" in line
    assert "errs by up to 10% on CPUs: trying it" in line and "\n" not in line


def test_with_plan_refuse_what_exceeds_the_forecasts_error_is_refused(monkeypatch):
    monkeypatch.setattr(fit, "changes", lambda config: ())  # the search is the test's before
    config = configured("attention=mha", "plan.refuse=true", fsdp=8)
    mesh = AbstractMesh((1, 8, 1, 1), ("data", "fsdp", "context", "tensor"))
    needs = memory(config).peak
    assert "too little" in check_memory(config, mesh, needs - 1)
    with pytest.raises(LrkvError, match="too little.*plan.refuse=false"):
        check_memory(config, mesh, int(needs / 1.11))


def test_where_nothing_fits_the_line_says_so():
    config = configured("attention=mha", "train.remat=full")
    found = verdict(config, 1000)
    assert not found.fits and found.change is None
    assert "the device (no mesh) needs" in found.sentence(config.mesh)
    assert "that was tried fits" in found.sentence(config.mesh)


def test_changes_come_in_order_of_preference_and_ask_for_possible_things():
    config = configured("attention=mha", data=2, fsdp=2)
    tried = list(changes(config))
    singles = [next(iter(change)) for change in tried if len(change) == 1]
    order = ["train.remat", "train.accumulation", "mesh.fsdp", "mesh.tensor",
             "optimizer.moments_dtype"]  # fmt: skip
    assert singles == sorted(singles, key=order.index)
    assert tried[0] == {"train.remat": "minimal"} and tried[1] == {"train.remat": "full"}
    # Eight rows over four devices: two each, so that two microbatches are the most.
    folds = [c["train.accumulation"] for c in tried if list(c) == ["train.accumulation"]]
    assert folds == [2]
    # The same four devices, split otherwise, come before more of them.
    meshes = [c for c in tried if "mesh.fsdp" in c]
    assert meshes[0] == {"mesh.data": 1, "mesh.fsdp": 4}
    last = configured("train.remat=full", "optimizer.moments_dtype=bfloat16", fsdp=8)
    assert all("train.remat" not in c or c["train.remat"] == "full" for c in changes(last))


def test_more_devices_are_counted_in_the_suggestion():
    from lrkv_jax.foresight.fit import Verdict

    found = Verdict(200_000_000_000, 130_000_000_000, {"mesh.fsdp": 16}, 110_000_000_000)
    assert found.sentence(MeshConfig(fsdp=8)) == (
        "each of the 8 devices (mesh.fsdp=8) needs 200 GB for a training step and has 130 GB, "
        "70.0 GB too little: mesh.fsdp=16 on 16 devices would fit, with 110 GB"
    )


def test_auto_is_bfloat16_as_on_an_accelerator():
    config = resolved(configured("attention=mha"))
    assert (config.model.dtype, config.optimizer.muon.dtype) == ("bfloat16", "bfloat16")
    asked = resolved(configured("attention=mha", "model.dtype=float32"))
    assert asked.model.dtype == "float32"


def test_a_mesh_that_cannot_split_the_model_is_refused():
    with pytest.raises(LrkvError, match="mesh.tensor = 8 does not divide model.heads = 4"):
        memory(configured("attention=mha", tensor=8))
