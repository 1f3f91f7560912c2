"""Accounting from configuration alone against the model itself, and against the paper's tables."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hlo

from lrkv_jax.config import ModelConfig, load_config
from lrkv_jax.config.schema import TrainConfig
from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.models.accounting import counts as accounting
from lrkv_jax.models.accounting.serving import serving
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA, MQA
from lrkv_jax.models.attention.cache import in_int8
from lrkv_jax.models.transformer import (
    abstract_model,
    abstract_parameters,
    parameters,
    with_parameters,
)

PAPER_SCALES = ["128m", "512m_8k", "1.2b", "2.5b", "6.3b"]
SCALES = [*PAPER_SCALES, "quickstart"]
VARIANTS = ["mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent"]


@functools.cache
def config_of(scale, variant, *overrides):
    return load_config(scale, [f"attention={variant}", *overrides])


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def check_against_the_model(model):
    """Every count equals a sum over the real model's weights and the real cache's arrays."""
    real = abstract_model(model)
    params = parameters(real)
    counts = accounting.parameter_counts(model)
    attention = params["blocks"]["attention"]
    vectors = {"query_gain", "key_gain", "query_bias", "key_bias", "output_bias"}
    made_by_queries = {"query", "query_rope", "output", *vectors}
    assert counts.total == size(params)
    assert counts.embedding == size(params["embedding"])
    assert counts.head == size(params.get("head", {}))
    assert counts.attention == size(attention)
    assert counts.kv == size({k: v for k, v in attention.items() if k not in made_by_queries})
    assert counts.mlp == size(params["blocks"]["mlp"])

    for dtype in (jnp.bfloat16, jnp.float32):
        itemsize = dtype.dtype.itemsize
        # Really allocated; the stack's own module, as a layer's cache does not need its weights.
        batch, length = 2, 3
        cache = there(real.blocks.attention.init_cache(batch, length, dtype))
        live = model.layers * sum(leaf.nbytes for leaf in cache.values()) / (batch * length)
        assert accounting.cache_allocated_bytes_per_token(model, itemsize) == live
        padding = model.layers * padding_values(real.blocks.attention, cache)
        assert accounting.cache_bytes_per_token(model, itemsize) == live - padding * itemsize
        if not model.attention.int8_rows(model):
            continue
        smaller = in_int8(real.blocks.attention.cache_shapes(batch, length, dtype))
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(smaller))
        in_bytes = model.model_copy(update={"kv_cache_dtype": "int8"})
        allocated = accounting.cache_allocated_bytes_per_token(in_bytes, itemsize)
        assert allocated == model.layers * nbytes / (batch * length)
    # With a cache in bfloat16, what is float32 is a scalar and the rest are values or padding.
    cache = there(real.blocks.attention.cache_shapes(1, 1, jnp.bfloat16))
    values = sum(size(leaf) for leaf in cache.values() if leaf.dtype == jnp.bfloat16)
    values -= padding_values(real.blocks.attention, cache)
    assert accounting.cache_values_per_token(model) == model.layers * values


def there(cache):
    """A cache's arrays by name, those that it has."""
    return {name: leaf for name, leaf in vars(cache).items() if leaf is not None}


def padding_values(layer, cache):
    """Columns of a layer's cached latents, the [B, S, H, R] arrays, past those its weights fill.

    Keys' biases fill one more of keys' latents.
    """
    downs = {"rk_BSGR": "key_down", "rv_BSGR": "value_down", "private_BSGR": "private_down"}
    total = 0
    for name, down in downs.items():
        if name in cache:
            heads, _, rank = getattr(layer, down).get_value().shape[-3:]
            rank += name == "rk_BSGR" and layer.key_bias is not None
            total += heads * (cache[name].shape[-1] - rank)
    return total


# The model itself.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", SCALES)
def test_counts_equal_the_model_of_every_shipped_yaml(scale, variant):
    check_against_the_model(config_of(scale, variant).model)


@st.composite
def models(draw):
    heads = draw(st.sampled_from([1, 2, 3, 6]))
    head_width = draw(st.sampled_from([2, 4, 8]))
    attention = draw(
        st.one_of(
            st.builds(MHA),
            st.builds(MQA),
            st.sampled_from([GQA(kv_heads=g) for g in range(1, heads + 1) if heads % g == 0]),
            st.builds(
                MLA, kv_lora_rank=st.integers(1, 12), qk_rope_head_dim=st.sampled_from([0, 2, 6])
            ),
            st.builds(
                MLA,
                kv_lora_rank=st.integers(1, 12),
                rope=st.just("full"),
                rank=st.integers(0, head_width),
            ),
            st.builds(
                LRKV,
                rank=st.integers(1, head_width),
                rope=st.sampled_from(["full", "latent"]),
                kv_heads=st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]),
            ),
            st.builds(
                LRKV,
                rank=st.integers(0, head_width) | st.sampled_from([0, head_width]),
                rope=st.sampled_from(["full", "shared", "latent"]),
            ),
        )
    )
    qk_norm = draw(st.booleans())
    return ModelConfig(
        layers=draw(st.integers(1, 3)),
        width=draw(st.integers(1, 24)),
        heads=heads,
        head_width=head_width,
        feed_forward=draw(st.none() | st.integers(1, 40)),
        gated=draw(st.booleans()),
        vocabulary=draw(st.integers(2, 60)),
        attention=attention,
        qk_norm=qk_norm,
        qk_gain=qk_norm and attention.rotates_full_keys and draw(st.booleans()),
        qkv_bias=attention.rotates_full_keys and draw(st.booleans()),
        norm_gain=draw(st.booleans()),
        tied_head=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(models())
def test_counts_equal_the_model_of_any_shape(model):
    check_against_the_model(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "attention",
    [
        LRKV(rank=0),
        LRKV(rank=8),
        LRKV(rank=0, rope="shared"),
        MLA(kv_lora_rank=5, qk_rope_head_dim=0),
    ],
    ids=["lrkv-rank0", "lrkv-rankK", "lrkv-rank0-shared", "mla-no_rope_key"],
)
def test_counts_equal_the_model_at_the_edges(attention, tied):
    shape = {"layers": 2, "width": 12, "heads": 3, "head_width": 8, "vocabulary": 20}
    check_against_the_model(
        ModelConfig(**shape, attention=attention, tied_head=tied, norm_gain=True)
    )


# The paper's and the audit's figures. Counts to the precision they are printed in.


@pytest.mark.parametrize(
    ("scale", "variant", "overrides", "printed"),
    [
        ("128m", "mha", ["model.tied_head=true"], "0.124"),
        ("128m", "mha", [], "0.162"),
        ("512m_8k", "mha", ["model.tied_head=true"], "0.757"),
        ("512m_8k", "mha", [], "0.834"),
        ("1.2b", "mha", ["model.tied_head=true"], "0.757"),
        ("1.2b", "mha", [], "0.834"),
        ("1.2b", "mha", ["model.layers=36"], "1.17"),
        ("2.5b", "mha", ["model.tied_head=true"], "2.41"),
        ("2.5b", "mha", [], "2.53"),
        ("2.5b", "mha", ["model.layers=18"], "1.38"),
        ("6.3b", "mha", ["model.tied_head=true"], "6.65"),
        ("6.3b", "mha", [], "6.85"),
        ("6.3b", "lrkv", [], "6.28"),
        ("6.3b", "lrkv", [], "6.3"),
    ],
)
def test_parameters_are_the_audits(scale, variant, overrides, printed):
    total = accounting.parameter_counts(config_of(scale, variant, *overrides).model).total
    decimals = len(printed.partition(".")[2])
    assert f"{total / 1e9:.{decimals}f}" == printed


@pytest.mark.parametrize(
    ("variant", "printed"),
    [
        ("mha", [100.0] * 5),
        ("gqa", [50.0, 33.3, 33.3, 33.3, 6.3]),
        ("mqa", [16.7, 8.3, 8.3, 5.6, 3.1]),
        ("mla", [8.3, 8.3, 8.3, 8.3, 12.5]),
        ("lrkv", [52.6, 48.2, 48.2, 48.5, 45.3]),
    ],
)
def test_cache_shares_are_the_papers(variant, printed):
    for scale, percent in zip(PAPER_SCALES, printed, strict=True):
        share = 100 * accounting.cache_fraction_published(config_of(scale, variant).model)
        assert share == pytest.approx(percent, abs=0.0501), scale


def test_cache_shares_with_the_rope_key_are_the_audits():
    printed = {"128m": 12.5, "1.2b": 10.4, "2.5b": 9.72, "6.3b": 13.3}
    for scale, percent in printed.items():
        share = 100 * accounting.cache_fraction(config_of(scale, "mla").model)
        assert share == pytest.approx(percent, abs=0.05), scale


def test_cache_bytes_with_float32_norms_are_the_audits():
    printed = {"128m": 53.4, "1.2b": 49.0, "2.5b": 49.3, "6.3b": 46.1}
    for scale, percent in printed.items():
        share = 100 * accounting.cache_bytes_fraction(config_of(scale, "lrkv").model)
        assert share == pytest.approx(percent, abs=0.05), scale


@pytest.mark.parametrize(
    ("scale", "printed"),
    [("128m", 96.8), ("512m_8k", 408), ("1.2b", 272), ("2.5b", 825), ("6.3b", 2156)],
)
def test_exaflops_are_the_audits(scale, printed):
    exaflops = accounting.training_exaflops(config_of(scale, "mha"))
    assert exaflops == pytest.approx(printed, abs=0.5 if printed > 100 else 0.05)


def test_flops_are_six_n_and_twelve_lhkt():
    """By hand for 1 layer, D 4, H 2, K 2, F 16, V 10 at context 8."""
    model = ModelConfig(layers=1, width=4, heads=2, head_width=2, vocabulary=10, attention=MHA())
    matrices = 4 * (4 * 2 * 2) + 2 * (4 * 16) + 10 * 4  # q, k, v, output; MLP; head
    assert accounting.training_flops_per_token(model, 8) == 6 * matrices + 12 * 1 * 2 * 2 * 8
    tied = model.model_copy(update={"tied_head": True})
    assert accounting.training_flops_per_token(tied, 8) == 6 * matrices + 12 * 1 * 2 * 2 * 8
    # MLA's logits are K + P wide, its values K; a latent query of LRKV is K + R wide.
    mla = model.model_copy(update={"attention": MLA(kv_lora_rank=3, qk_rope_head_dim=2)})
    attention = 4 * 2 * (2 + 2) + 4 * (3 + 2) + 2 * 3 * 2 * 2 + 2 * 2 * 4
    matrices = attention + 2 * (4 * 16) + 10 * 4
    assert accounting.training_flops_per_token(mla, 8) == 6 * matrices + 6 * 2 * 8 * (4 + 2)


COUNTED = {
    "gqa": GQA(kv_heads=2),
    "mla": MLA(kv_lora_rank=24, qk_rope_head_dim=4),
    "mla-full": MLA(kv_lora_rank=24, rope="full"),
    **{f"lrkv-{rope}": LRKV(rank=2, rope=rope) for rope in ("full", "shared", "latent")},
}
GROUPED = {
    "mla-full": MLA(kv_lora_rank=24, rope="full", kv_heads=2),
    **{f"lrkv-{rope}": LRKV(rank=2, rope=rope, kv_heads=2) for rope in LRKV.modes()},
}


# A narrow model's LRKV forms its heads' weights (A15); a wide one's keeps the factors.
NARROW = {name: entry for name, entry in COUNTED.items() if name.startswith("lrkv")}


@pytest.mark.parametrize(
    ("attention", "qk_norm", "width"),
    [
        (MHA(), True, 512),
        *((entry, norm, 512) for entry in COUNTED.values() for norm in (True, False)),
        *((entry, True, 64) for entry in NARROW.values()),
        *((entry, norm, 1024) for entry in GROUPED.values() for norm in (True, False)),
    ],
    ids=[
        "mha", *(f"{name}-{norm}" for name in COUNTED for norm in ("norm", "no_norm")),
        *(f"{name}-formed" for name in NARROW),
        *(f"{name}-groups-{norm}" for name in GROUPED for norm in ("norm", "no_norm")),
    ],
)  # fmt: skip
def test_flops_are_three_times_the_products_of_a_forward_pass(attention, qk_norm, width):
    """In `shared` and `latent`, B^K multiplies each of H queries and, for the norm, G keys."""
    context = 16
    model = ModelConfig(
        layers=2, width=width, heads=4, head_width=8, vocabulary=48, attention=attention,
        qk_norm=qk_norm, dtype="float32", unroll=2, gated=isinstance(attention, GQA),
    )  # fmt: skip
    params = abstract_parameters(model)
    tokens_BT = jax.ShapeDtypeStruct((3, context), jnp.int32)
    forward = jax.jit(lambda params, tokens_BT: with_parameters(model, params)(tokens_BT))
    text = forward.lower(params, tokens_BT).compile().as_text()
    executed = accounting.executed_flops_per_token(model, context, 3 * context)
    assert executed * 3 * context == pytest.approx(3 * hlo.product_flops(text), rel=1e-12)
    formed = executed != accounting.training_flops_per_token(model, context)
    assert formed == (width == 64 and isinstance(attention, LRKV))


def test_the_budget_is_the_tokens_asked_or_the_steps_taken():
    config = config_of("quickstart", "mha")
    assert accounting.training_tokens(config) == config.train.steps * 8 * 256
    train = TrainConfig(seq_len=256, global_batch_size=8, tokens=1_000_000)  # 488.28 steps
    asked = config.model_copy(update={"train": train})
    assert accounting.training_tokens(asked) == 1_000_000


# Decoding.


def test_decoding_reads_weights_once_and_every_cache():
    """By hand for MHA at 128M on an H200, 2,048 tokens: 75.5 MB a sequence."""
    model, device = config_of("128m", "mha").model, hardware("h200")
    found = serving(model, device, 2048)
    cache = 12 * 2 * 6 * 128 * 2 * 2048
    parameters, table = accounting.parameter_counts(model).total, 50304 * 768
    assert (found.weights, found.cache_per_sequence) == (2 * parameters, cache)
    assert found.largest_batch == int((0.9 * 141e9 - 2 * parameters) // cache)
    assert found.floor_of_one == pytest.approx((2 * (parameters - table) + cache) / 4.8e12)
    step = (2 * (parameters - table) + found.largest_batch * cache) / 4.8e12
    assert found.floor == pytest.approx(step)
    assert found.tokens_per_second == pytest.approx(found.largest_batch / step)
    assert found.flops_per_byte == 1.0  # a key and a value: 4 FLOPs for 4 bytes
    # Half of the cache, twice the batch.
    gqa = serving(config_of("128m", "gqa").model, device, 2048)
    assert gqa.largest_batch == pytest.approx(2 * found.largest_batch, abs=2)


def test_a_model_that_no_sequence_fits_beside_has_no_batch():
    tiny = dataclasses.replace(hardware("a100"), memory=10**9)
    found = serving(config_of("6.3b", "mha").model, tiny, 2048)
    assert found.largest_batch == 0 and found.tokens_per_second == 0
