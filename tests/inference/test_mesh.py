"""On a mesh an engine says what the forward says, and no device holds another's cache."""

import logging
import re
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.engines import PROMPTS, assert_greedy, engine_of, program_counts, whole_logits
from support.marks import quick
from support.meshes import mesh_of
from support.variants import ALL, FIVE, HYBRID, PRETRAINED, error

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import programs
from lrkv_jax.inference.pages import PAGE
from lrkv_jax.inference.schedule import SchedulerOutput
from lrkv_jax.models.attention import GQA

NEW = 7
EXACT = 1e-5  # float32, relative to the logits' scale
ROUNDED = 0.02  # an int8 cache
EIGHT = 2, 2, 1, 2  # over data, fsdp, context and tensor
ROWS = ("data", "fsdp")
# What heads share is whole on each tensor shard; what is a head's own is split.
PLACES = {
    "k_BSGK": P(ROWS, None, "tensor"),
    "v_BSGK": P(ROWS, None, "tensor"),
    "latent_BSC": P(ROWS),
    "rope_key_BSP": P(ROWS),
    "k_shared_BSK": P(ROWS),
    "v_shared_BSK": P(ROWS),
    "rk_BSGR": P(ROWS, None, "tensor"),
    "rv_BSGR": P(ROWS, None, "tensor"),
    "inverse_norm_BGS": P(ROWS, "tensor"),
    "private_BSGR": P(ROWS, None, "tensor"),
}


# GQA's heads are split as MHA's are.
LINES = {name: entry for name, entry in FIVE.items() if name != "mha"} | {
    name: ALL[name] for name in ("mla-full-rank", "lrkv-joint-groups", "lrkv-latent-groups")
}
LINES["hybrid"] = ALL["lrkv-none-groups"]


@pytest.mark.parametrize(
    ("name", "cache"),
    quick(slow=[*((name, "auto") for name in LINES), ("lrkv", "int8")]),
)
def test_eight_devices_say_what_the_forward_says_each_from_its_share_of_the_cache(name, cache):
    model = {"kv_cache_dtype": cache, **(PRETRAINED if name in ("gqa", "mla-full-rank") else {})}
    if name == "hybrid":
        model |= HYBRID
    before = program_counts()
    engine = engine_of(LINES[name], mesh=mesh_of(*EIGHT), model=model)
    text = engine.generate(PROMPTS, NEW)
    if cache == "auto":
        assert_greedy(engine.config, PROMPTS, text)
    # Those of the first token, which the prompt alone makes.
    logits_BV = engine.forced_logits(PROMPTS, [[0]] * len(PROMPTS))[:, 0]
    forward_BV = np.stack([logits_TV[-1] for logits_TV in whole_logits(engine.config, PROMPTS)])
    assert error(logits_BV, forward_BV) <= (EXACT if cache == "auto" else ROUNDED)
    assert engine.generate(PROMPTS[:3], NEW) == text[:3]
    # Pieces, beginnings that choose and that are told, steps.
    assert np.subtract(program_counts(), before)[:3].tolist() == [1, 2, 1]

    arrays = [pair for cache in engine.calls.cache()[:2] for pair in vars(cache).items()]
    for key, array in arrays:
        for leaf in jax.tree.leaves(array):
            place = P(ROWS) if leaf.shape[2:3] == (1,) else PLACES[key]  # MQA has one head
            assert leaf.sharding.spec == place
            parts = [leaf.shape[0] // 4, *leaf.shape[1:]]
            if "tensor" in place:
                parts[place.index("tensor")] //= 2
            assert {shard.data.shape for shard in leaf.addressable_shards} == {tuple(parts)}

    with jax.set_mesh(engine.mesh):
        lowered = programs.decode.lower(*steps_arguments(engine), most=engine.steps_per_call)
    gathering = r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective)"
    gathered = re.findall(gathering, lowered.compile().as_text())
    assert gathered  # `fsdp` gathers weights: the pattern does find what there is
    assert not [shape for shape in gathered if str(PAGE) in shape.split(",")]


@pytest.mark.parametrize(
    ("name", "kernel", "cached"),
    [("mha", "grouped_decode", 1), ("mla", "latent_decode", 2), ("lrkv", "lrkv_decode", 1)],
)
def test_a_kernel_is_called_with_one_devices_sequences_heads_and_cache(
    name, kernel, cached, monkeypatch
):
    """No compiler can split a Mosaic kernel: it must be called on what is already split."""
    engine = engine_of(FIVE[name], mesh=mesh_of(*EIGHT))
    module = sys.modules[type(engine.calls.model.blocks[0].attention).__module__]
    call, seen = getattr(module, kernel), []

    def watched(*arrays, **settings):
        seen.append((arrays[0].shape, arrays[cached].shape))
        return call(*arrays, **settings)

    monkeypatch.setattr(module, kernel, watched)
    with jax.set_mesh(engine.mesh):
        programs.decode.trace(*steps_arguments(engine), most=3)
    # A sequence of four, two heads of four, and a shard's three pages; one layer.
    (query, cache), *more = seen
    assert query[:3] == (1, 1, 2) and cache[:2] == (3, PAGE) and not more


def steps_arguments(engine):
    calls = engine.calls
    given = calls.step_inputs(SchedulerOutput())
    return calls.model, calls.cache(), calls.slots, given, np.int32(3), np.False_, None


@pytest.mark.parametrize("decoded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_key_value_heads_that_tensor_does_not_divide_stay_whole_and_it_is_said(caplog, decoded):
    with caplog.at_level(logging.WARNING, "lrkv_jax.inference"):
        engine = engine_of(GQA(kv_heads=2), mesh=mesh_of(tensor=4))
    assert "mesh.tensor = 4 does not divide the key/value heads" in caplog.text
    if decoded:
        assert_greedy(engine.config, PROMPTS, engine.generate(PROMPTS, NEW))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(engine.calls.cache()))


@pytest.mark.slow
def test_a_batch_that_the_mesh_does_not_divide_is_filled_up_and_the_mesh_in_use_is_taken():
    alone = engine_of(FIVE["lrkv"], batch=3).generate(PROMPTS[:3], NEW)
    with jax.set_mesh(mesh_of(data=2, tensor=2)):
        engine = engine_of(FIVE["lrkv"], batch=3)
    assert engine.mesh.shape["tensor"] == 2 and engine.batch == 4
    assert engine.generate(PROMPTS[:3], NEW) == alone
    latents = engine.calls.cache()[0].rk_BSGR
    pages, _, heads, _ = latents.addressable_shards[0].data.shape
    assert (2 * pages, 2 * heads) == (latents.shape[0], latents.shape[2])


@pytest.mark.slow
def test_on_a_mesh_too_pages_that_were_swapped_out_come_back_as_they_were():
    engine = engine_of(FIVE["lrkv"], mesh=mesh_of(*EIGHT), length=192, pages=3 * 4)
    prompts = [2 * prompt[:48] for prompt in PROMPTS]
    texts = engine.generate(prompts * 2, 80)
    assert texts[:4] == engine_of(FIVE["lrkv"], length=192).generate(prompts, 80)
    engine.reset()
    engine.scheduler._expected = 0.0
    requests = [engine.submit(prompt, 80) for prompt in prompts * 2]
    engine.finish(requests)
    assert [request.output_ids for request in requests] == texts
    held = [engine.submit(prompt, 9, retain=True) for prompt in prompts]
    engine.finish(held)
    engine.finish([engine.submit(prompt[::-1], 80) for prompt in prompts])
    assert any(request.swapped for request in held)
    for request in held:
        engine.append(request, [], 71)
    engine.finish(held)
    ours = [request.tokens[len(p) :] for request, p in zip(held, prompts, strict=True)]
    assert ours == texts[:4]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (lambda: mesh_of(tensor=8), "mesh.tensor = 8 does not divide model.heads = 4: use one of"),
        (lambda: mesh_of(*EIGHT), "decode_kernel = interpret does not run on several"),
        (lambda: jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), "a mesh of axes x: "),
    ],
)
def test_a_mesh_that_cannot_split_the_model_is_refused(mesh, message):
    with pytest.raises(LrkvError, match=message) as error:
        engine_of(FIVE["mha"], mesh=mesh(), model={"decode_kernel": "interpret"})
    assert "\n" not in str(error.value)
