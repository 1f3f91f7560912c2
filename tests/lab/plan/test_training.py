"""A step on a mesh: its state, memory and collectives, compiled and in closed form."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.tiny import TINY

from lrkv_jax.config import load_config
from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.plan import hlo
from lrkv_jax.lab.plan.compiled import compiled_step
from lrkv_jax.lab.plan.estimate import collectives, memory, state_bytes
from lrkv_jax.lab.plan.training import matrices, resolved, training
from lrkv_jax.models.accounting.muon import muon_flops, muon_flops_per_device
from lrkv_jax.models.transformer import abstract_parameters
from lrkv_jax.training.state import abstract_state

MESHES = {
    "fsdp8": {"fsdp": 8},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp2-context2-tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
}


def configured(*overrides, fsdp=1, **sizes):
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": fsdp, **sizes}.items()]
    return load_config("configs/quickstart.yaml", [*TINY, *mesh, *overrides])


def on_first_device(tree):
    """Bytes of a tree's arrays on device 0."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
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
    assert counted.parameters == on_first_device(state["params"])
    assert counted.optimizer == on_first_device(state["opt_state"])
    assert counted.gradients == counted.parameters  # both float32


def sent(found, kind):
    return sum(one["bytes"] for one in found if one["kind"] == kind)


@pytest.fixture(scope="module")
def planned():
    """(configuration, plan) of a compiled step on eight devices, in float32."""
    config = configured("attention=mha", "model.dtype=float32", fsdp=8)
    return config, training(config, hardware("h200"), None, compiled=True)


def test_the_compiled_step_gathers_weights_twice_and_scatters_gradients_once(planned):
    config, plan = planned
    sizes = split_weights(config)
    gathered, scattered = sizes["layers"] * 2 + sizes["head"], sum(sizes.values())
    # Each of 8 sends its eighth to 7 others; the tokens of the lookup are gathered too.
    tokens = 7 * (8 // 8) * 32 * 4
    assert sent(plan["collectives"], "all-gather") == gathered * 4 * 7 / 8 + tokens
    assert sent(plan["collectives"], "reduce-scatter") == scattered * 4 * 7 / 8
    assert {(one["devices"], one["reach"]) for one in plan["collectives"]} == {(8, 8)}


def split_weights(config):
    """Elements of the weights that fsdp splits: of the layers, and of the head."""
    tree = abstract_parameters(config.model)
    layers = [w for part in ("attention", "mlp") for w in tree["blocks"][part].values()]
    head = math.prod(tree["head"]["kernel"].shape)
    return {"layers": sum(math.prod(w.shape) for w in layers), "head": head}


def test_the_closed_form_sends_what_the_compiled_step_does_for_weights(planned):
    config, plan = planned
    estimated = [vars(one) for one in collectives(config, state_bytes(config))]
    for kind in ("all-gather", "reduce-scatter"):
        assert sent(estimated, kind) == pytest.approx(sent(plan["collectives"], kind), rel=0.01)


def test_memory_is_xlas_and_the_verdict_says_so(planned):
    config, plan = planned
    step, state = plan["compiled"], state_bytes(config)
    batch = (8 // 8) * 33 * 4
    held = state.parameters + state.optimizer + batch
    assert held <= step["arguments"] <= held + 512  # the key, counters of steps and of the guard
    parts = step["arguments"] + step["output"] + step["temporary"] - step["alias"]
    assert step["total"] == parts == plan["verdict"]["needs"]
    assert "by XLA and has 130 GB: it fits" in plan["verdict"]["sentence"]
    assert step["product_flops"] > 0 and step["seconds"] > 0


def test_more_devices_than_are_simulated_are_named():
    with pytest.raises(LrkvError, match="16 devices cannot be simulated here.*count=16 first"):
        compiled_step(configured("train.batch=16", fsdp=16), 16)


GROUPS = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %b = s32[8]{0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %c = f32[8]{0} all-reduce(%p), replica_groups=mesh['data'=2,'fsdp'=4] {'data'}, to_apply=%sum
}
"""


def test_groups_are_read_in_every_form_and_bfloat16_is_not_counted_as_float32():
    found = {(c.kind, c.devices): (c.reach, c.bytes) for c in hlo.sent(GROUPS, 8, gathered=2)}
    assert found == {
        ("all-gather", 4): (7, 3 * 2 * 2),  # devices 0, 2, 4, 6; a quarter to three others
        ("all-gather", 2): (2, 1 * 4 * 4),
        ("all-reduce", 2): (5, 2 * 8 * 4 // 2),
    }


def test_one_device_sends_nothing():
    config = resolved(configured("attention=mha"))
    assert collectives(config, state_bytes(config)) == []


def test_muon_is_shared_out_whole_and_no_device_repeats_work():
    config = configured("attention=mha", "model.layers=3", fsdp=8)
    groups = matrices(config.model, {"data": 1, "fsdp": 8, "context": 1, "tensor": 1})
    # Queries, keys, values and outputs are one group of 12; both MLP matrices one of 6.
    assert sorted((g.rows, g.columns, g.count) for g in groups) == [(32, 32, 12), (32, 128, 6)]
    busiest, everything = muon_flops_per_device(groups, 5, 8), muon_flops(groups, 5)
    one = {(g.rows, g.columns): muon_flops([g], 5) // g.count for g in groups}
    assert busiest == 2 * one[32, 32] + one[32, 128]  # 12 over 8 is 2 at most, 6 over 8 is 1
    assert everything / 8 <= busiest < everything


# The closed form of memory.


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        ("128m", "attention=lrkv", "mesh.fsdp=8"),
        ("128m", "attention=lrkv_latent", "mesh.fsdp=4", "mesh.tensor=2"),
        ("6.3b", "attention=mla", "mesh.fsdp=8", "train.remat=minimal"),
    ],
    ids="-".join,
)
def test_the_estimate_is_within_a_quarter_of_xla(run):
    command = [sys.executable, "-m", "lrkv_jax.cli", "plan", *run, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compiling the step for 8 simulated devices" in done.stderr
    plan = json.loads(done.stdout)["training"]
    memory = plan["memory"]
    estimate = memory["estimates"][memory["remat"]]["total"]
    assert estimate == pytest.approx(plan["compiled"]["total"], rel=0.25)


def needed(config):
    return memory(config, state_bytes(config))


def test_policies_keep_less_and_need_less():
    found = {p: needed(resolved(configured("attention=lrkv", f"train.remat={p}", fsdp=8)))
             for p in ("none", "minimal", "full", "offload")}  # fmt: skip
    assert found["none"].kept > found["minimal"].kept > found["full"].kept
    # One row of 32 positions of width 32, in bfloat16, for each of two layers: a layer's input.
    assert found["full"].kept == 2 * 32 * 32 * 2
    # What is offloaded lies in the host's memory.
    assert found["offload"] == found["full"]
    held = {name: one.total - one.kept for name, one in found.items()}
    assert len(set(held.values())) == 1


def test_a_tensor_shard_keeps_its_share_of_what_is_split():
    """Twice the heads, MLP and vocabulary over two tensor shards: the same on each."""
    half = resolved(configured("attention=mha", "model.layers=2"))
    sizes = ("model.heads=8", "model.feed_forward=256", "model.vocabulary=8192")
    both = resolved(configured("attention=mha", *sizes, tensor=2))
    assert needed(both) == needed(half)


def test_auto_is_bfloat16_as_on_an_accelerator():
    config = resolved(configured("attention=mha"))
    assert (config.model.dtype, config.optimizer.muon.dtype) == ("bfloat16", "bfloat16")
    asked = resolved(configured("attention=mha", "model.dtype=float32"))
    assert asked.model.dtype == "float32"


def test_a_mesh_that_cannot_split_the_model_is_refused():
    with pytest.raises(LrkvError, match="mesh.tensor = 8 does not divide model.heads = 4"):
        state_bytes(configured("attention=mha", tensor=8))


# Verdicts.


def verdict(config, memory):
    small = replace(hardware("h200"), memory=memory)
    return training(config, small, None, compiled=False)["verdict"]


def test_a_device_that_is_too_small_is_named_with_what_would_fit():
    config = load_config("6.3b", ["mesh.fsdp=8", "train.remat=none", "attention=lrkv"])
    found = verdict(config, 22_000_000_000)
    assert not found["fits"]
    assert found["sentence"] == (
        "each of the 8 devices (mesh.fsdp=8) needs 24.7 GB by the estimate and has 20.2 GB, "
        "4.45 GB too little: train.remat=minimal would fit, with about 19.9 GB"
    )
    smaller = verdict(config, 12_000_000_000)["sentence"]
    assert "train.remat=full and mesh.fsdp=16 on 2 times as many devices would fit" not in smaller
    wide = load_config("6.3b", ["mesh.fsdp=8", "train.batch=64", "attention=lrkv"])
    assert (
        "train.remat=full and mesh.fsdp=16 on 2 times as many devices would fit"
        in (verdict(wide, 14_000_000_000)["sentence"])
    )


def test_where_nothing_fits_the_line_says_so():
    found = verdict(configured("attention=mha", "train.remat=full"), 1000)
    assert found["sentence"].startswith("the device (no mesh) needs 0.0")
    assert "no change of remat or mesh that was tried fits" in found["sentence"]
