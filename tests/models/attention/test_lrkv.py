"""LRKV's mathematics: what the paper's RoPE identity costs, and what is exact in its place.

T tokens  H heads  D width  K head width  R rank
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jaxprs import sizes
from support.oracle import rope
from support.variants import error, random_params, random_tokens, small

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


@pytest.mark.parametrize(("share", "off"), [(0.1, 0.05), (1.0, 0.5)])
def test_the_papers_rope_identity_forgets_relative_position_and_the_mix_form_does_not(share, off):
    """RoPE(K_h) = RoPE(K_shared) + RoPE(R_h) B_hᵀ is wrong; the residual is `share` of the rest."""
    T, K, R = 40, 32, 8
    q_TK, shared_TK = np.random.default_rng(0).standard_normal((2, T, K))
    latent_TR = np.random.default_rng(1).standard_normal((T, R))
    up_KR = share * np.random.default_rng(2).standard_normal((K, R)) / R**0.5

    def exact_and_printed(start):
        positions_T = np.arange(start, start + T)
        exact_TK = rope(shared_TK + latent_TR @ up_KR.T, positions_T)
        printed_TK = rope(shared_TK, positions_T) + rope(latent_TR, positions_T) @ up_KR.T
        rotated_TK = rope(q_TK, positions_T)
        return rotated_TK @ exact_TK.T, rotated_TK @ printed_TK.T

    def apart(value, truth):
        return np.linalg.norm(value - truth) / np.linalg.norm(truth)

    (exact, printed), (exact_later, printed_later) = map(exact_and_printed, (0, 50))
    assert apart(printed, exact) > off
    assert apart(printed_later, printed) > off
    assert apart(exact_later, exact) < 1e-12


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
