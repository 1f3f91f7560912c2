"""LRKV's mathematics: what the paper's RoPE identity costs, and what is exact in its place.

T tokens  H heads  D width  K head width  R rank
"""

import functools

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
def logits_of(model, tokens, positions):
    """Weights are arguments: models that differ in nothing else share a program."""
    return model(tokens, positions)


def logits(config, params, positions=None):
    """Of one document of nine tokens."""
    positions = np.arange(9)[None] if positions is None else positions
    return logits_of(with_parameters(config, params), random_tokens(1, 9), positions)


@functools.cache
def designed(D, K, R):
    """The attention's weights of one layer, as a new model has them, in float64."""
    attention = LRKV(rank=R)
    config = ModelConfig(
        layers=1, width=D, heads=4, head_width=K, vocabulary=8, attention=attention
    )
    weights = jax.jit(lambda: init_parameters(config, 0)["blocks"]["attention"])()
    return jax.tree.map(lambda w: np.asarray(w[0], np.float64), weights)


def designed_keys(residual: float, *, D=64, K=32, R=8, T=40):
    """(q, shared key, latent, B) in float64 from the designed initialization of one head.

    `residual` scales B, so that 1 is the design's ‖U Bᵀ‖ = 0.1 ‖W‖ and 10 an equal share.
    """
    weights = designed(D, K, R)
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((T, D))
    q_TK = rng.standard_normal((T, K))
    up_KR = residual * weights["key_up"][0].T
    return q_TK, x_TD @ weights["key"], x_TD @ weights["key_down"][0], up_KR


def exact_logits(q_TK, shared_TK, latent_TR, up_KR, start=0):
    positions_T = np.arange(start, start + len(q_TK))
    keys_TK = shared_TK + latent_TR @ up_KR.T
    return rope(q_TK, positions_T) @ rope(keys_TK, positions_T).T


def printed_logits(q_TK, shared_TK, latent_TR, up_KR, start=0):
    """RoPE(K_h) = RoPE(K_shared) + RoPE(R_h) B_hᵀ, as the paper prints it."""
    positions_T = np.arange(start, start + len(q_TK))
    keys_TK = rope(shared_TK, positions_T) + rope(latent_TR, positions_T) @ up_KR.T
    return rope(q_TK, positions_T) @ keys_TK.T


def frobenius(value, truth):
    return np.linalg.norm(value - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize(("residual", "at_least"), [(1.0, 0.05), (10.0, 0.5)])
def test_the_papers_rope_identity_is_wrong(residual, at_least):
    parts = designed_keys(residual)
    exact = exact_logits(*parts)
    assert frobenius(printed_logits(*parts), exact) > at_least
    # The residual part alone is off by more than dropping it would be.
    q_TK, shared_TK, latent_TR, up_KR = parts
    alone = (q_TK, 0 * shared_TK, latent_TR, up_KR)
    assert frobenius(printed_logits(*alone), exact_logits(*alone)) > 1.0


def test_the_papers_rope_identity_forgets_relative_position_and_the_mix_form_does_not():
    parts = designed_keys(10.0)
    assert frobenius(printed_logits(*parts, start=50), printed_logits(*parts)) > 0.1
    assert frobenius(exact_logits(*parts, start=50), exact_logits(*parts)) < 1e-12


def test_rank_zero_is_mqa():
    lrkv, mqa = small(LRKV(rank=0)), small(MQA())
    shared = random_params(lrkv)
    attention = dict(shared["blocks"]["attention"])
    for name in ("key", "value"):
        attention[name] = attention[name][:, :, None]  # one key/value head
    params = {**shared, "blocks": {**shared["blocks"], "attention": attention}}
    assert error(logits(lrkv, shared), logits(mqa, params)) < 1e-6
    count = [sum(p.size for p in jax.tree.leaves(tree)) for tree in (shared, params)]
    assert count[0] == count[1]


@pytest.mark.parametrize("groups", [4, 2])
def test_full_rank_represents_any_mha_and_with_groups_any_gqa(groups):
    model = small(MHA() if groups == 4 else GQA(kv_heads=groups))
    K = model.head_width
    lrkv = small(LRKV(rank=K, kv_heads=groups, rope="full"))
    theirs = random_params(model, groups)
    attention = dict(theirs["blocks"]["attention"])
    for name in ("key", "value"):
        each_LDGK = attention[name]
        shared_LDK = each_LDGK.mean(axis=2)  # any shared part will do
        attention[name] = shared_LDK
        attention[f"{name}_down"] = (each_LDGK - shared_LDK[:, :, None]).swapaxes(1, 2)
        attention[f"{name}_up"] = jnp.broadcast_to(jnp.eye(K), (2, groups, K, K))
    params = {**theirs, "blocks": {**theirs["blocks"], "attention": attention}}
    assert error(logits(lrkv, params), logits(model, theirs)) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_a_group_is_heads_of_equal_residuals(mode):
    """Residuals of a group, repeated for each of its heads, are the same model without groups."""
    grouped, each = (small(LRKV(rank=3, kv_heads=g, rope=mode)) for g in (2, None))
    theirs = random_params(grouped)
    attention = {
        name: jnp.repeat(w, 2, axis=1) if name.endswith(("_down", "_up")) else w
        for name, w in theirs["blocks"]["attention"].items()
    }
    params = {**theirs, "blocks": {**theirs["blocks"], "attention": attention}}
    assert error(logits(each, params), logits(grouped, theirs)) < 1e-6


def test_an_mla_that_rotates_its_whole_keys_spans_mha_at_a_latent_of_all_heads():
    """With W_down an isometry of the stream, whose norm is fixed, the latent's norm is a number."""
    mha = small(MHA())
    D, C = mha.width, mha.heads * mha.head_width
    theirs = random_params(mha)
    attention = dict(theirs["blocks"]["attention"])
    down_CD = np.linalg.qr(np.random.default_rng(7).standard_normal((C, D)))[0]
    # rms(x W_down) = sqrt(D / C) of an x of rms 1, so c = sqrt(C / D) x W_down.
    attention["down"] = np.float32(np.broadcast_to(down_CD.T, (mha.layers, D, C)))
    for name in ("key", "value"):
        whole_LDHK = np.asarray(attention.pop(name), np.float64)
        up_LCHK = (D / C) ** 0.5 * np.einsum("CD,LDHK->LCHK", down_CD, whole_LDHK)
        attention[f"up_{name}"] = np.float32(up_LCHK)
    params = {**theirs, "blocks": {**theirs["blocks"], "attention": attention}}
    mla = small(MLA(kv_lora_rank=C, rope="full"))
    assert error(logits(mla, params), logits(mha, theirs)) < 1e-5


@pytest.mark.parametrize(
    ("width", "head_width", "rank"),
    [
        (64, 32, 8),
        pytest.param(192, 64, 33, marks=pytest.mark.slow),
        pytest.param(768, 128, 46, marks=pytest.mark.slow),
    ],
)
def test_the_residual_starts_at_a_tenth_of_the_shared_part(width, head_width, rank):
    weights = designed(width, head_width, rank)
    for name in ("key", "value"):
        residual = np.sqrt(np.mean(np.square(weights[f"{name}_down"] @ weights[f"{name}_up"])))
        shared = np.sqrt(np.mean(np.square(weights[name])))
        assert residual / shared == pytest.approx(0.1, rel=0.15)


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
    moved = {**params, "blocks": {**params["blocks"], "attention": attention}}
    assert error(logits(config, moved), logits(config, params)) < 1e-5


@pytest.mark.parametrize(
    "entry",
    [*(LRKV(rank=4, rope=m) for m in MODES), MLA(kv_lora_rank=11, rope="full")],
    ids=lambda entry: entry.label,
)
def test_logits_depend_on_relative_positions_alone(entry):
    config = small(entry)
    params, positions = random_params(config), np.arange(9)[None]
    assert error(logits(config, params, positions + 37), logits(config, params)) < 1e-5


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


@pytest.mark.parametrize("mode", MLA.modes())
def test_latents_of_single_heads_that_make_nothing_leave_the_common_one(mode):
    key = {"qk_rope_head_dim": 4} if mode == "decoupled" else {}
    shape = {"kv_lora_rank": 8, "rope": mode, **key}
    common, both = small(MLA(**shape)), small(MLA(**shape, rank=3))
    theirs = random_params(both)
    attention = dict(theirs["blocks"]["attention"])
    for name in ("private_key", "private_value"):
        attention[name] = jnp.zeros_like(attention[name])
    silent = {**theirs, "blocks": {**theirs["blocks"], "attention": attention}}
    kept = {name: w for name, w in attention.items() if not name.startswith("private")}
    params = {**theirs, "blocks": {**theirs["blocks"], "attention": kept}}
    assert error(logits(both, silent), logits(common, params)) < 1e-5
    assert error(logits(both, theirs), logits(common, params)) > 1e-2
