"""The Transformer around the attention: shapes, number formats, start values, and its settings.

B batch  T positions  V vocabulary
"""

import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.variants import FIVE, VOCABULARY, error, random_params, random_tokens, small

from lrkv_jax.kernels.cross_entropy import chunked_cross_entropy
from lrkv_jax.models.attention import LRKV, MHA
from lrkv_jax.models.transformer import (
    Transformer,
    init_parameters,
    parameters,
    specs,
    with_parameters,
)

# Weights are arguments: XLA would spend its time folding constants.
logits_of = jax.jit(lambda model, tokens_BT: model(tokens_BT))
hidden_of = jax.jit(lambda model, tokens_BT: model.hidden(tokens_BT))
TOKENS_BT = random_tokens(2, 7)  # of one shape, so that tests share programs


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "as it stands"])
def test_logits_are_float32_of_the_vocabulary_and_hidden_states_of_the_width(traced):
    config = small(LRKV(rank=3), dtype="bfloat16")
    model = with_parameters(config, random_params(config))

    def both(model, tokens):
        return model(tokens), model.hidden(tokens)

    call = partial(jax.eval_shape, both) if traced else both
    logits, hidden = call(model, TOKENS_BT)
    chex.assert_shape([logits, hidden], [(2, 7, VOCABULARY), (2, 7, config.width)])
    chex.assert_type([logits, hidden], [jnp.float32, jnp.bfloat16])


@pytest.mark.parametrize("name", FIVE)
def test_parameters_are_float32_mirror_their_specs_and_repeat_with_the_seed(name):
    config = small(FIVE[name], dtype="bfloat16")
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
    for path in (("embedding", "table"), ("blocks", "mlp", "up"), ("blocks", "attention", "query")):
        ours, its = (functools.reduce(dict.get, path, tree) for tree in (params, mha))
        assert ours.shape != its.shape or np.array_equal(ours, its), path


def test_the_first_loss_is_ln_v():
    config = small(MHA())
    model = with_parameters(config, init_parameters(config, 0))
    hidden, head = hidden_of(model, TOKENS_BT), model.head_kernel()
    nll = chunked_cross_entropy(hidden, head, TOKENS_BT, softcap=15.0, chunk=64)
    np.testing.assert_allclose(nll, np.log(VOCABULARY), rtol=1e-6)


def test_layers_start_different_from_each_other():
    up_LDF = init_parameters(small(MHA()), 0)["blocks"]["mlp"]["up"]
    assert abs(np.corrcoef(up_LDF[0].ravel(), up_LDF[1].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n != "lrkv" else n for n in FIVE],
)
def test_stacked_unrolled_and_listed_layers_are_one_model(name):
    config = small(FIVE[name])
    params = random_params(config)
    stacked = with_parameters(config, params)
    unrolled = with_parameters(config.model_copy(update={"unroll": 2}), params)
    expected = logits_of(stacked, TOKENS_BT)
    assert error(logits_of(unrolled, TOKENS_BT), expected) < 1e-6
    listed = jax.jit(lambda model, tokens: model.unstacked()(tokens))
    assert error(listed(stacked, TOKENS_BT), expected) < 1e-6


# GQA and MQA are MHA with fewer groups.
@pytest.mark.parametrize("name", ["mha", "mla", "lrkv"])
def test_bfloat16_is_float32_within_rounding(name):
    config = small(FIVE[name])
    params = random_params(config)
    exact = logits_of(with_parameters(config, params), TOKENS_BT)
    small_floats = config.model_copy(update={"dtype": "bfloat16"})
    rounded = logits_of(with_parameters(small_floats, params), TOKENS_BT)
    # 8 bits of mantissa, through two layers of a dozen products each.
    assert 1e-5 < error(rounded, exact) < 0.06


def test_the_cap_bounds_logits_and_none_leaves_them():
    config = small(MHA(), softcap=2.0)
    params = jax.tree.map(lambda p: p, random_params(config))
    params["head"] = {"kernel": 50 * params["head"]["kernel"]}
    capped = logits_of(with_parameters(config, params), TOKENS_BT)
    without = config.model_copy(update={"softcap": None})
    free = logits_of(with_parameters(without, params), TOKENS_BT)
    assert abs(free).max() > 10
    np.testing.assert_allclose(capped, 2 * np.tanh(free / 2), rtol=1e-5, atol=1e-6)


def test_a_tied_head_is_the_embedding_over_the_root_of_the_width():
    config = small(MHA(), tied_head=True, softcap=None)
    params = random_params(config)
    assert "head" not in params
    model = with_parameters(config, params)
    tokens = random_tokens(1, 5)
    table = np.asarray(params["embedding"]["table"], np.float64)
    expected = np.asarray(model.hidden(tokens), np.float64) @ table.T / np.sqrt(config.width)
    assert error(model(tokens), expected) < 1e-5


def test_gains_scale_the_norms_they_belong_to():
    config = small(MHA(), norm_gain=True)
    params = random_params(config)
    before = hidden_of(with_parameters(config, params), TOKENS_BT)
    params = {**params, "norm": {"gain": 3 * params["norm"]["gain"]}}
    assert error(hidden_of(with_parameters(config, params), TOKENS_BT), 3 * before) < 1e-6


@pytest.mark.parametrize(
    "change", [{"embedding_norm": False}, {"activation": "gelu"}, {"activation": "silu"},
               {"rope_base": 500.0}, {"qk_norm": False}, {"norm_eps": 0.5}]
)  # fmt: skip
def test_every_setting_changes_the_model(change):
    config = small(MHA())
    params = random_params(config)
    plain = logits_of(with_parameters(config, params), TOKENS_BT)
    changed = logits_of(with_parameters(config.model_copy(update=change), params), TOKENS_BT)
    assert error(changed, plain) > 1e-3


def test_tokens_of_another_rank_are_refused_at_the_boundary():
    config = small(MHA())
    model = with_parameters(config, random_params(config))
    with pytest.raises(AssertionError):
        model(random_tokens(5))


def test_the_constructor_and_the_dict_of_arrays_are_the_same_model():
    from flax import nnx

    config = small(MHA())
    model = Transformer(config, rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal(parameters(model), init_parameters(config, 0))
