"""LRKV's mathematics: what it represents, how it starts, and what it never makes.

H heads  D width  G groups  K head width  L layers
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jaxprs import sizes
from support.variants import error, random_model, random_params, random_tokens, small

from lrkv_jax.config import ModelConfig
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA, MQA, abstract_layer
from lrkv_jax.models.transformer import init_parameters, with_parameters

MODES = ("full", "shared", "latent")


@jax.jit
def logits_of(model, tokens):
    """Weights are arguments: models that differ in nothing else share a program."""
    return model(tokens, np.arange(9)[None])


def logits(config, params, attention=None):
    """Of one document of nine tokens, with other weights of the attention where they are given."""
    if attention is not None:
        params = {**params, "blocks": {**params["blocks"], "attention": attention}}
    return logits_of(with_parameters(config, params), random_tokens(1, 9))


def test_rank_zero_is_mqa():
    lrkv, mqa = small(LRKV(rank=0)), small(MQA())
    params = random_params(lrkv)
    attention = dict(params["blocks"]["attention"])
    for name in ("key", "value"):
        attention[name] = attention[name][:, :, None]  # one key/value head
    assert error(logits(lrkv, params), logits(mqa, params, attention)) < 1e-6
    shapes = [jax.tree.map(np.size, random_params(config)) for config in (lrkv, mqa)]
    assert sum(jax.tree.leaves(shapes[0])) == sum(jax.tree.leaves(shapes[1]))


@pytest.mark.parametrize("groups", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_full_rank_represents_any_mha_and_with_groups_any_gqa(groups):
    model = small(MHA() if groups == 4 else GQA(kv_heads=groups))
    K = model.head_width
    lrkv = small(LRKV(rank=K, kv_heads=groups, rope="full"))
    params = random_params(model, groups)
    attention = dict(params["blocks"]["attention"])
    for name in ("key", "value"):
        each_LDGK = attention[name]
        shared_LDK = each_LDGK.mean(axis=2)  # any shared part will do
        attention[name] = shared_LDK
        attention[f"{name}_down"] = (each_LDGK - shared_LDK[:, :, None]).swapaxes(1, 2)
        attention[f"{name}_up"] = jnp.broadcast_to(jnp.eye(K), (2, groups, K, K))
    assert error(logits(lrkv, params, attention), logits(model, params)) < 1e-5


def test_the_residual_starts_at_a_tenth_of_the_shared_part():
    config = small(LRKV(rank=33), layers=1, width=192, head_width=64)
    weights = jax.jit(lambda: init_parameters(config, 0)["blocks"]["attention"])()
    for name in ("key", "value"):
        residual = np.asarray(weights[f"{name}_down"] @ weights[f"{name}_up"])
        shared = np.asarray(weights[name])
        assert residual.std() / shared.std() == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("mode", ["full", "shared"])
def test_the_latents_basis_is_free(mode):
    """U → U G, B → G⁻¹ B changes no logit (in `latent` the rotation fixes the basis)."""
    config = small(LRKV(rank=4, rope=mode))
    params = random_params(config)
    attention = dict(params["blocks"]["attention"])
    rng = np.random.default_rng(5)
    for name in ("key", "value"):
        gauge = np.eye(4) + 0.4 * rng.standard_normal((2, config.heads, 4, 4))
        attention[f"{name}_down"] = np.float32(attention[f"{name}_down"] @ gauge)
        attention[f"{name}_up"] = np.float32(np.linalg.inv(gauge) @ attention[f"{name}_up"])
    assert error(logits(config, params, attention), logits(config, params)) < 1e-5


@pytest.mark.parametrize(
    "entry",
    [*(LRKV(rank=5, rope=m) for m in MODES), MLA(kv_lora_rank=10, rope="full")],
    ids=lambda entry: entry.label,
)
def test_decoding_never_holds_a_heads_keys_or_values_for_the_whole_cache(entry):
    K, H, cached, S = 32, 2, 10, 1031  # no product of the others makes S · H · K
    config = ModelConfig(
        layers=1, width=48, heads=H, head_width=K, vocabulary=8, attention=entry, dtype="float32"
    )
    layer = abstract_layer(config)
    cache = jax.eval_shape(lambda: layer.init_cache(1, S, jnp.float32))
    jaxpr = jax.make_jaxpr(lambda layer, x, cache, n: layer.decode(x, cache, n))(
        layer, np.zeros((1, 1, 48), np.float32), cache, np.array([S - 1])
    )
    largest = max(sizes(jaxpr.jaxpr))
    assert largest < S * H * K
    assert largest >= S * cached  # the latents themselves: the walk does see the cache


def test_unrotated_it_decodes_by_the_papers_equations_as_they_are_printed():
    """Equations 6 and 7 (arXiv 2601.11471) in float64, of one query and a cache of nine tokens."""
    config = small(LRKV(rank=3, rope="none"), layers=1, qk_norm=False)
    layer, rng = random_model(config).blocks[0].attention, np.random.default_rng(1)
    x_BTD, K = np.float32(rng.standard_normal((1, 9, config.width))), config.head_width
    _, cache = layer.decode(x_BTD, layer.init_cache(1, 9), np.zeros(1, int))
    query, at_B1 = layer.queries(x_BTD[:, 8:], None), np.array([[8]])
    out_HK = np.asarray(layer.attend_cached(query, cache, at_B1, None)[0])[0, 0]
    cached = {name: np.float64(leaf)[0] for name, leaf in vars(cache).items() if leaf is not None}
    up_key_HRK, up_value_HRK = np.float64(layer.key_up[...]), np.float64(layer.value_up[...])
    for h, q_K in enumerate(np.float64(query[0])[0, 0]):
        rk_SR, rv_SR = cached["rk_BSGR"][:, h, :3], cached["rv_BSGR"][:, h, :3]
        logits_S = q_K @ cached["k_shared_BSK"].T + (q_K @ up_key_HRK[h].T) @ rk_SR.T
        a_S = np.exp(logits_S / np.sqrt(K)) / np.exp(logits_S / np.sqrt(K)).sum()
        printed_K = a_S @ cached["v_shared_BSK"] + (a_S @ rv_SR) @ up_value_HRK[h]
        assert error(out_HK[h], printed_K) < 1e-6
