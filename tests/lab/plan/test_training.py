"""A step on a mesh: its state, memory and time, compiled and in closed form."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from support.tiny import TINY

from lrkv_jax.config import load_config
from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.plan.estimate import (
    memory_estimate,
    muon_flops,
    newton_schulz_flops,
    state_bytes,
    time_estimate,
)
from lrkv_jax.lab.plan.training import compiled_step, resolved, training
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.training.state import abstract_state

SHARES = (0.3, 0.5)  # of the peak
planned = partial(training, utilization=SHARES)


def configured(*overrides, fsdp=1, **sizes):
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": fsdp, **sizes}.items()]
    return load_config("configs/quickstart.yaml", [*TINY, *mesh, *overrides])


def test_state_is_what_live_arrays_hold():
    settings = "attention=lrkv", "optimizer.moments_dtype=bfloat16", "model.norm_gain=true"
    config = configured(*settings, data=2, fsdp=2, tensor=2)
    # Zeros, put where the step's state lies: making a real state would compile its initialization.
    abstract = abstract_state(config, make_mesh(config.mesh))
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        {"params": abstract.params, "opt_state": abstract.opt_state},
    )

    def on_first_device(tree):
        shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        return sum(one.data.nbytes for one in shards if one.device == jax.devices()[0])

    counted = state_bytes(config)
    assert counted.parameters == on_first_device(state["params"])
    assert counted.optimizer == on_first_device(state["opt_state"])
    assert counted.gradients == counted.parameters  # both float32


@pytest.mark.slow
def test_memory_is_xlas_of_the_compiled_step_and_the_verdict_says_so():
    smaller = "model.layers=1", "optimizer.muon.iterations=1"
    config = configured("attention=mha", "model.dtype=float32", *smaller, fsdp=2)
    plan = planned(config, hardware("h200"), None, compiled=True)
    step, state = plan["compiled"], state_bytes(config)
    batch = (8 // 2) * 33 * 4
    held = state.parameters + state.optimizer + batch
    assert held <= step["arguments"] <= held + 512  # the key, counters of steps and of the guard
    # The new state overwrites the old one; what is left of the output is metrics.
    assert 0 <= step["total"] - step["arguments"] - step["temporary"] < 1024
    assert step["total"] == plan["verdict"]["needs"]
    assert "by XLA and has 130 GB: it fits" in plan["verdict"]["sentence"]


@pytest.mark.parametrize(("scale", "small", "large"), [("128m", 5, 0.3), ("6.3b", 47, 2.9)])
def test_newton_schulz_is_the_measured_share_of_a_step(scale, small, large):
    """Percent of the forward and backward FLOPs at 32,768 and at 524,288 tokens a step."""
    config = load_config(scale, ["attention=mha"])
    flops = muon_flops(config)
    # X Xᵀ, its square, and their sum times X, of a 3 × 5 matrix and of its transpose.
    products = 2 * 3 * 5 * 3 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 5
    assert newton_schulz_flops(3, 5, 5) == newton_schulz_flops(5, 3, 5) == 5 * products
    per_token = training_flops_per_token(config.model, 2048)
    assert round(100 * flops / (per_token * 32_768)) == small
    assert round(100 * flops / (per_token * 524_288), 1) == large


def test_the_time_is_that_of_the_flops_between_two_shares_of_the_peak():
    config = load_config("128m", ["attention=mha"])
    found = time_estimate(config, hardware("h200"), 8, SHARES)
    published = training_flops_per_token(config.model, 2048) * 32_768
    flops = published + muon_flops(config)
    assert found["step"] == pytest.approx([flops / (8 * n * 989.5e12) for n in (0.5, 0.3)])
    assert found["tokens_per_second"] == pytest.approx([32_768 / n for n in found["step"][::-1]])
    assert found["hours"] == pytest.approx([n * 100e9 / 32_768 / 3600 for n in found["step"]])
    assert found["device_hours"] == pytest.approx([8 * n for n in found["hours"]])
    again = load_config("128m", ["attention=mha", "train.remat=full"])
    more = time_estimate(again, hardware("h200"), 8, SHARES)["step"][0] - found["step"][0]
    assert more == pytest.approx(published / 3 / (8 * 0.5 * 989.5e12))  # a forward pass
    train = config.train.model_copy(update={"teacher_model": config.model})
    taught = config.model_copy(update={"train": train})
    costs = time_estimate(taught, hardware("h200"), 8, SHARES)["step"][0] - found["step"][0]
    assert costs == pytest.approx(more) and muon_flops(taught) == muon_flops(config)
    still = config.train.model_copy(update={"trainable": "keys_and_values"})
    assert 0 < muon_flops(config.model_copy(update={"train": still})) < muon_flops(config) / 4
    with pytest.raises(LrkvError, match="nowhere is not a run"):
        planned(load_config("128m", ["train.teacher=nowhere"]), hardware("h200"), 8, compiled=False)


@pytest.mark.parametrize("settings", [
    ("mesh.data=4 mesh.fsdp=1", ["mesh.data=1 mesh.fsdp=4"]),
    ("mesh.fsdp=2", ["train.grad_accum_steps=4", "train.remat=minimal", "mesh.fsdp=4"]),
    ("mesh.fsdp=8 train.remat=full", [
        "train.global_batch_size=256", "train.remat=none",
        "train.remat=minimal train.global_batch_size=128",
    ]),
])  # fmt: skip
def test_each_alternative_fits_and_costs_what_a_plan_of_it_says(settings):
    """Without a time for a step that does not fit; of one that fits, all save a tenth."""
    changed, wanted = settings
    plan = planned(load_config("6.3b", changed.split()), hardware("h100"), None, compiled=False)
    found = [
        " ".join(f"{k}={v}" for k, v in one["changes"].items()) for one in plan["alternatives"]
    ]
    assert found == wanted and plan["verdict"]["fits"] == (plan["time"] is not None)
    for text, one in zip(found, plan["alternatives"], strict=True):
        config = load_config("6.3b", [*changed.split(), *text.split()])
        again = planned(config, hardware("h100"), None, compiled=False)
        assert again["verdict"]["fits"] and again["verdict"]["needs"] == one["needs"]
        assert again["time"]["device_hours"] == one["device_hours"]
        assert not plan["time"] or one["device_hours"] <= [
            0.9 * n for n in plan["time"]["device_hours"]
        ]


@pytest.mark.slow
def test_the_estimate_is_within_a_quarter_of_xla():
    run = "6.3b", "attention=mla", "mesh.fsdp=8", "train.remat=minimal"
    command = [sys.executable, "-m", "lrkv_jax.cli", "plan", *run, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compiling the step for 8 simulated devices" in done.stderr
    plan = json.loads(done.stdout)["training"]
    memory = plan["memory"]
    estimate = memory["estimates"][memory["remat"]]["total"]
    assert estimate == pytest.approx(plan["compiled"]["total"], rel=0.25)


def test_policies_keep_less_and_a_tensor_shard_its_share():
    def needed(config):
        return memory_estimate(config, state_bytes(config))

    found = {p: needed(resolved(configured("attention=lrkv", f"train.remat={p}", fsdp=8)))
             for p in ("none", "minimal", "full", "offload")}  # fmt: skip
    assert found["none"].activations > found["minimal"].activations
    # One row of 32 positions of width 32, in bfloat16, for each of two layers: a layer's input.
    assert found["full"].activations == 2 * 32 * 32 * 2
    # What is offloaded lies in the host's memory.
    assert found["offload"] == found["full"]
    held = {name: one.total - one.activations for name, one in found.items()}
    assert len(set(held.values())) == 1
    # Twice the heads, MLP and vocabulary over two tensor shards: the same on each.
    half = resolved(configured("attention=mha", "model.layers=2"))
    sizes = ("model.heads=8", "model.feed_forward=256", "model.vocabulary=8192")
    both = resolved(configured("attention=mha", *sizes, tensor=2))
    assert needed(both) == needed(half)


def test_what_cannot_be_split_simulated_or_held_is_named_with_what_is_missing():
    with pytest.raises(LrkvError, match="mesh.tensor = 8 does not divide model.heads = 4"):
        state_bytes(configured("attention=mha", tensor=8))
    with pytest.raises(LrkvError, match="16 devices cannot be simulated here.*count=16 first"):
        compiled_step(configured("train.global_batch_size=16", fsdp=16), 16)
    config = load_config("6.3b", ["mesh.fsdp=8", "train.remat=none", "attention=lrkv"])

    def verdict(memory):
        small = replace(hardware("h200"), memory=memory)
        return planned(config, small, None, compiled=False)["verdict"]

    found = verdict(22_000_000_000)
    assert not found["fits"]
    assert found["sentence"] == (
        "Each of the 8 devices (mesh.fsdp=8) needs 24.7 GB by the estimate and has 20.2 GB, "
        "4.45 GB too little."
    )
    assert verdict(30_000_000_000)["fits"]
