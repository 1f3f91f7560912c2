"""Accounting from configuration alone against the model itself, and against the paper's tables."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from support import hlo
from support.marks import quick
from support.variants import ALL, HYBRID, JOINT, small

from lrkv_jax.config import ModelConfig, load_config
from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.models.accounting import counts as accounting
from lrkv_jax.models.accounting.serving import attention_flops, serving
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA
from lrkv_jax.models.attention.cache import in_int8
from lrkv_jax.models.transformer import Unstacked, abstract_parameters, with_parameters


def config_of(scale, variant, *overrides):
    return load_config(scale, [f"attention={variant}", *overrides])


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ALL)
def test_counts_equal_the_model(name):
    """Every count equals a sum over the real model's weights and the real cache's arrays."""
    more = {"layers": 3, "width": 23, "norm_gain": True, "gated": True}
    whole = ALL[name].rotates_full_keys
    model = small(ALL[name], qk_gain=whole, qkv_bias=whole, tied_head=whole, **more)
    params = abstract_parameters(model)
    real = with_parameters(model, params)
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

    if model.attention.int8_rows(model):  # of other caches, the contract's suite
        smaller = in_int8(real.blocks.attention.cache_shapes(2, 3, jnp.dtype("bfloat16")))
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(smaller))
        in_bytes = model.model_copy(update={"kv_cache_dtype": "int8"})
        allocated = accounting.cache_allocated_bytes_per_token(in_bytes)
        assert allocated == model.layers * nbytes / (2 * 3)


def test_counts_of_a_hybrid_are_sums_over_its_layers_and_its_windows_end():
    model = small(ALL["lrkv-none-odd_rank"], **HYBRID)
    windowed, everywhere = model.cycle
    counts, params = accounting.parameter_counts(model), abstract_parameters(model)
    attention = [block["attention"] for block in params["blocks"].values()]
    assert counts.total == size(params) and counts.attention == size(attention)

    def nbytes(tokens):
        def made(params):
            whole = Unstacked(with_parameters(model, params))
            return whole.init_cache(1, tokens, jnp.bfloat16)

        caches = jax.eval_shape(made, params)
        return [
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one)) for one in caches
        ]

    assert accounting.cache_allocated_bytes_per_token(model) == sum(nbytes(1))
    for length in (3, 100):
        near, all_of_it = nbytes(min(length, model.window))[0], nbytes(length)[1]
        assert accounting.cache_allocated_bytes(model, length) == 2 * near + 2 * all_of_it
        halves = [
            attention_flops(kind).at(min(length, kind.window or length)) for kind in model.cycle
        ]
        assert attention_flops(model).at(length) == sum(halves) / 2
        flops = [accounting.training_flops_per_token(kind, length) for kind in model.cycle]
        assert accounting.training_flops_per_token(model, length) == sum(flops) / 2
    # A token of a window of 5 pays for 5 pairs, whatever the context.
    grows = [accounting.training_flops_per_token(windowed, context) for context in (5, 9)]
    assert grows[0] == grows[1] < accounting.training_flops_per_token(everywhere, 9)
    mha = accounting.with_mha(model)
    assert accounting.cache_fraction(model) == (2 * 8 * 2 + 2 * 8 + 4 * 3 * 2) / (2 * 2 * 8 * 4)
    assert {kind.attention for kind in mha.cycle} == {MHA()}


# The paper's and the audit's figures. Counts to the precision they are printed in.


@pytest.mark.parametrize(
    ("scale", "variant", "overrides", "printed"),
    [
        ("128m", "mha", ["model.tied_head=true"], "0.124"),
        ("128m", "mha", [], "0.162"),
        ("512m_8k", "mha", [], "0.834"),
        ("1.2b", "mha", ["model.layers=36"], "1.17"),
        ("2.5b", "mha", [], "2.53"),
        ("2.5b", "mha", ["model.layers=18"], "1.38"),
        ("6.3b", "mha", ["model.tied_head=true"], "6.65"),
        ("6.3b", "mha", [], "6.85"),
        ("6.3b", "lrkv", [], "6.28"),
    ],
)
def test_parameters_are_the_audits(scale, variant, overrides, printed):
    total = accounting.parameter_counts(config_of(scale, variant, *overrides).model).total
    decimals = len(printed.partition(".")[2])
    assert f"{total / 1e9:.{decimals}f}" == printed


def test_cache_bytes_with_float32_norms_are_the_audits():
    """And the shares of values with MLA's rope key, and the widths that DeepSeek has."""
    for variant, of, printed in (
        ("mla", accounting.cache_fraction, (12.5, 10.4, 9.72, 13.3)),
        ("lrkv", accounting.cache_bytes_fraction, (53.4, 49.0, 49.3, 46.1)),
    ):
        for scale, percent in zip(("128m", "1.2b", "2.5b", "6.3b"), printed, strict=True):
            share = 100 * of(config_of(scale, variant).model)
            assert share == pytest.approx(percent, abs=0.05), scale
    deepseeks = small(LRKV(rank=16, **JOINT), heads=14, head_width=64)
    assert accounting.cache_values_per_token(deepseeks) == deepseeks.layers * (512 + 64)


FLOPS = {
    "mha": MHA(),
    "gqa": GQA(kv_heads=2),
    "mla": MLA(kv_lora_rank=24, qk_rope_head_dim=4),
    "mla-groups": MLA(kv_lora_rank=24, rope="full", kv_heads=2),
    "lrkv-full": LRKV(rank=2, rope="full"),
    "lrkv-latent": LRKV(rank=2, rope="latent"),
    "lrkv-latent-no_norm": LRKV(rank=2, rope="latent"),
    "lrkv-full-groups": LRKV(rank=2, rope="full", kv_heads=2),
    "lrkv-joint-groups": LRKV(rank=2, kv_heads=2, **JOINT),
    "lrkv-latent-groups": LRKV(rank=2, rope="latent", kv_heads=2),
}


@pytest.mark.parametrize("name", quick("lrkv-full", "lrkv-latent-groups", slow=FLOPS))
def test_flops_are_three_times_the_products_of_a_forward_pass(name):
    """In `shared` and `latent`, B^K multiplies H queries and, for G norms, the shared key."""
    context = 16
    model = ModelConfig(
        layers=2, width=64, heads=4, head_width=8, vocabulary=48, attention=FLOPS[name],
        qk_norm=name != "lrkv-latent-no_norm", dtype="float32", unroll=2,
        gated=name == "gqa", tied_head=name == "mha",
    )  # fmt: skip
    params = abstract_parameters(model)
    tokens_BT = jax.ShapeDtypeStruct((3, context), jnp.int32)
    forward = jax.jit(lambda params, tokens_BT: with_parameters(model, params)(tokens_BT))
    text = forward.lower(params, tokens_BT).compile().as_text()
    # What is done once a step, B Bᵀ for the norms of G keys, is not in the count of a token.
    once = 2 * 2 * ({"lrkv-latent": 4, "lrkv-latent-groups": 2}.get(name, 0) * 2**2 * 8)
    counted = accounting.training_flops_per_token(model, context) * 3 * context
    assert counted == 3 * (hlo.product_flops(text) - once)


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

    # No sequence fits beside this one.
    tiny = dataclasses.replace(hardware("a100"), memory=10**9)
    found = serving(config_of("6.3b", "mha").model, tiny, 2048)
    assert found.largest_batch == 0 and found.tokens_per_second == 0
