"""The block of pretrained models, whole, against Hugging Face's equations in float64.

The settings are those of each family; sizes are small. `support.oracle` has the equations.
"""

import jax
import numpy as np
import pytest
from support import oracle
from support.variants import error, random_params, random_tokens, small

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.models.attention import GQA, MHA
from lrkv_jax.models.transformer import with_parameters

LLAMA = {
    "norm_gain": True, "norm_eps": 1e-5, "qk_norm": False, "embedding_norm": False,
    "activation": "silu", "gated": True, "softcap": None, "rope_base": 500.0,
}  # fmt: skip
# A quarter of the pairs is kept, a half divided, and the blend lies between.
LLAMA3 = RopeScaling(kind="llama3", factor=8, original_context=64)
YARN = RopeScaling(kind="yarn", factor=20, original_context=32, beta_fast=4)
QWEN3 = {**LLAMA, "norm_eps": 1e-6, "qk_norm": True, "qk_gain": True}
QWEN2 = {**LLAMA, "norm_eps": 1e-6, "qkv_bias": True}
MODELS = {
    "qwen2": (GQA(kv_heads=2), QWEN2),
    "qwen3": (GQA(kv_heads=2), QWEN3),
    "llama3": (GQA(kv_heads=2), {**LLAMA, "rope_scaling": LLAMA3, "tied_head": True}),
    "arcee": (
        MHA(), {**LLAMA, "gated": False, "activation": "relu2", "rope_scaling": YARN}
    ),
}  # fmt: skip
TOKENS_BT = random_tokens(2, 12)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_published_equations(name):
    """Theirs have no scale in a tied head: the last gain takes ours back."""
    attention, settings = MODELS[name]
    config = small(attention, **settings)
    params = theirs = random_params(config)
    if config.tied_head:
        params = {**theirs, "norm": {"gain": theirs["norm"]["gain"] * config.width**0.5}}
    logits_BTV = jax.jit(lambda model, tokens: model(tokens))(
        with_parameters(config, params), TOKENS_BT
    )
    for tokens_T, logits_TV in zip(TOKENS_BT, np.asarray(logits_BTV), strict=True):
        assert error(logits_TV, oracle.logits(config, theirs, tokens_T)) < 2e-6
