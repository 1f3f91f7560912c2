"""The Transformer around the attention: its equations, number formats, start values and layers.

B batch  T positions  V vocabulary
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import oracle
from support.variants import FIVE, HYBRID, VOCABULARY, error, random_params, random_tokens, small

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.models.attention import GQA, LRKV, MHA
from lrkv_jax.models.transformer import (
    Transformer,
    Unstacked,
    init_parameters,
    specs,
    with_parameters,
)
from lrkv_jax.models.weights import weights_of

# Weights are arguments: XLA would spend its time folding constants.
logits_of = jax.jit(lambda model, tokens_BT: model(tokens_BT))
TOKENS_BT = random_tokens(2, 12)  # of one shape, so that tests share programs

# Settings of pretrained families; sizes are small.
LLAMA = {
    "norm_gain": True, "norm_eps": 1e-5, "qk_norm": False, "embedding_norm": False,
    "activation": "silu", "gated": True, "softcap": None, "rope_base": 500.0,
}  # fmt: skip
# A quarter of the pairs is kept, a half divided, and the blend lies between.
LLAMA3 = RopeScaling(kind="llama3", factor=8, original_context=64)
YARN = RopeScaling(kind="yarn", factor=20, original_context=32, beta_fast=4)
PLAIN = {"gated": False, "activation": "relu2", "rope_scaling": YARN, "norm_eps": 0.5}
MODELS = {
    "ours": (MHA(), {"softcap": 0.5}),  # which bounds logits around 1
    "qwen3": (GQA(kv_heads=2), {**LLAMA, "norm_eps": 1e-6, "qk_norm": True, "qk_gain": True}),
    "llama3": (GQA(kv_heads=2), {**LLAMA, "rope_scaling": LLAMA3, "tied_head": True}),
    "arcee": (MHA(), {**LLAMA, **PLAIN}),
    "hybrid": (LRKV(rank=3, rope="none"), HYBRID),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_published_equations(name):
    """Against float64. Theirs have no scale in a tied head: the last gain takes ours back."""
    attention, settings = MODELS[name]
    config = small(attention, **settings)
    params = theirs = random_params(config)
    if config.tied_head:
        params = {**theirs, "norm": {"gain": theirs["norm"]["gain"] * config.width**0.5}}
    logits_BTV = logits_of(with_parameters(config, params), TOKENS_BT)
    for tokens_T, logits_TV in zip(TOKENS_BT, np.asarray(logits_BTV), strict=True):
        assert error(logits_TV, oracle.logits(config, theirs, tokens_T)) < 2e-6


def test_parameters_are_float32_mirror_their_specs_and_repeat_with_the_seed():
    config = small(FIVE["lrkv"], dtype="bfloat16")
    params = init_parameters(config, 3)
    chex.assert_trees_all_equal_dtypes(params, jax.tree.map(np.float32, params))
    chex.assert_trees_all_equal(params, init_parameters(config, 3))
    tree = specs(config)
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(tree), strict=True):
        assert leaf.ndim == len(spec.axes)
    for spec in jax.tree.leaves(tree["blocks"]):
        assert spec.axes[0] == "layers" and spec.batch >= 1 and spec.group == "matrix"
    other = init_parameters(config, 4)
    assert not np.array_equal(params["embedding"]["table"], other["embedding"]["table"])
    # One seed's variants share what they have in common, so that they can be compared in pairs.
    mha = init_parameters(small(MHA(), dtype="bfloat16"), 3)
    constructed = Transformer(small(MHA(), dtype="bfloat16"), rngs=nnx.Rngs(3))
    chex.assert_trees_all_equal(weights_of(constructed), mha)
    for path in (("embedding", "table"), ("blocks", "mlp", "up"), ("blocks", "attention", "query")):
        ours, its = (functools.reduce(dict.get, path, tree) for tree in (params, mha))
        assert ours.shape != its.shape or np.array_equal(ours, its), path


@pytest.mark.parametrize("name", ["lrkv", "hybrid", pytest.param("mla", marks=pytest.mark.slow)])
def test_stacked_unrolled_and_listed_layers_are_one_model(name):
    config = small(FIVE.get(name, FIVE["lrkv"]), **(HYBRID if name == "hybrid" else {}))
    params = random_params(config)
    stacked = with_parameters(config, params)
    unrolled = with_parameters(config.model_copy(update={"unroll": config.layers}), params)
    expected = logits_of(stacked, TOKENS_BT)
    assert error(logits_of(unrolled, TOKENS_BT), expected) < 1e-6
    listed = jax.jit(lambda model, tokens: Unstacked(model)(tokens))
    assert error(listed(stacked, TOKENS_BT), expected) < 1e-6


def test_bfloat16_is_float32_within_rounding():
    config = small(FIVE["lrkv"])
    params = random_params(config)
    exact = logits_of(with_parameters(config, params), TOKENS_BT)
    small_floats = config.model_copy(update={"dtype": "bfloat16"})
    model = with_parameters(small_floats, params)
    rounded = logits_of(model, TOKENS_BT)
    hidden = jax.eval_shape(model.hidden, TOKENS_BT)
    chex.assert_shape([rounded, hidden], [(2, 12, VOCABULARY), (2, 12, config.width)])
    chex.assert_type([rounded, hidden], [jnp.float32, jnp.bfloat16])
    # 8 bits of mantissa, through two layers of a dozen products each.
    assert 1e-5 < error(rounded, exact) < 0.06
