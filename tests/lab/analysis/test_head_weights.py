"""Extracted heads are the model's: its own logits and outputs equal products of their matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.variants import ALL, FIVE, MODES, WIDTH, error, random_model, random_params, small

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.analysis import head_weights
from lrkv_jax.lab.analysis.heads import random_heads
from lrkv_jax.models.attention.grouped import GroupedAttention


@functools.cache
def layer(name):
    """One layer of attention without QK-norm, its extracted heads, and inputs x [1, T, D]."""
    name, gain, _ = name.partition("-gain")
    # Gains without their norm, which no configuration may have: forms have gains, and no norms.
    config = small(ALL[name], qk_norm=False, layers=1).model_copy(update={"qk_gain": bool(gain)})
    params = random_params(config)
    attention = random_model(config).blocks[0].attention
    (heads,) = head_weights(config, params)
    x_BTD = np.random.default_rng(1).standard_normal((1, 6, WIDTH)).astype(np.float32)
    return attention, heads, x_BTD


def latent_rms(attention, x_BTD):
    """What MLA's latent is divided by, at each token; 1 elsewhere."""
    if not hasattr(attention, "down"):
        return np.ones(x_BTD.shape[1])
    latent_TC = x_BTD[0].astype(np.float64) @ np.asarray(attention.down[...], np.float64)
    return np.sqrt((latent_TC**2).mean(axis=-1) + attention.config.norm_eps)


@pytest.mark.parametrize(
    "name", ["gqa-gain", "mla", "lrkv-full-rank_0", *(f"lrkv-{mode}-odd_rank" for mode in MODES)]
)
def test_forms_are_the_models_logits_at_one_position_and_values_its_values(name):
    """Every token at position 5: x_t A_h x_s, for all t and s. MLA's form has no latent norm."""
    attention, heads, x_BTD = layer(name)
    positions_BT = jnp.full((1, 6), 5)

    @jax.jit
    def read(x_BTD):
        query = attention.expand_query(attention.queries(x_BTD, positions_BT), positions_BT)
        new_kv = attention.new_kv(x_BTD, positions_BT)
        return query, *attention.materialize_kv(new_kv, positions_BT)

    q_BTHW, k_BSGW, v_BSGK = read(x_BTD)
    H = q_BTHW.shape[2]
    k_SHW, v_SHK = (np.repeat(a[0], H // a.shape[2], axis=1) for a in (k_BSGW, v_BSGK))
    logits_HTS = np.einsum("THW,SHW->HTS", q_BTHW[0], k_SHW)
    x_TD = x_BTD[0].astype(np.float64)
    rms_S = latent_rms(attention, x_BTD)
    left_HDW, right_HDW = heads.query_key()
    whole_HTS = (x_TD @ left_HDW) @ (x_TD @ right_HDW).swapaxes(1, 2)
    content_HTS = whole_HTS / rms_S
    if heads.rope_key_DP is not None:  # what is left is the part with positions, under no norm
        bare_HTS = (x_TD @ heads.query_HDK) @ (x_TD @ heads.key_HDK).swapaxes(1, 2)
        content_HTS = bare_HTS / rms_S + whole_HTS - bare_HTS
        assert np.abs(whole_HTS - bare_HTS).max() > 0.1
    assert error(logits_HTS, content_HTS) < 3e-6
    values_HSK = x_TD @ heads.value_HDK / rms_S[:, None]
    assert error(v_SHK.swapaxes(0, 1), values_HSK) < 3e-6


@pytest.mark.slow  # whole layers, to be compiled
@pytest.mark.parametrize("name", ["gqa", "mla", "lrkv-full-odd_rank"])
def test_value_outputs_are_what_a_token_writes_for_itself(name):
    """Alone, a token attends to itself with weight 1: x Σ_h V_h O_h."""
    attention, heads, x_BTD = layer(name)
    x_TBD = x_BTD.swapaxes(0, 1)
    written_TD = attention(x_TBD, jnp.zeros((6, 1), jnp.int32))[:, 0]
    left_HDK, right_HDK = heads.value_output()
    x_TD = x_BTD[0].astype(np.float64)
    truth_TD = ((x_TD @ left_HDK) @ right_HDK.swapaxes(1, 2)).sum(axis=0)
    assert error(written_TD, truth_TD / latent_rms(attention, x_BTD)[:, None]) < 3e-6


def test_lrkv_keeps_its_parts():
    config = small(FIVE["lrkv"])
    params = random_params(config)
    attention = params["blocks"]["attention"]
    for at, heads in enumerate(head_weights(config, params)):
        weights = {k: np.asarray(v[at], np.float64) for k, v in attention.items()}
        for family, parts in (("key", heads.key_parts), ("value", heads.value_parts)):
            for h in range(config.heads):
                residual = weights[f"{family}_down"][h] @ weights[f"{family}_up"][h]
                np.testing.assert_allclose(parts.residual_HDK[h], residual, atol=1e-14)
                total = getattr(heads, f"{family}_HDK")[h]
                np.testing.assert_allclose(total, weights[family] + residual, atol=1e-14)


def test_what_cannot_be_analyzed_is_refused_by_name(monkeypatch):
    config = small(FIVE["mha"])
    params = random_params(config)
    attention = params["blocks"]["attention"]
    key = attention["key"].at[1, 0, 0, 0].set(jnp.nan)
    spoilt = {**params, "blocks": {"attention": {**attention, "key": key}}}
    with pytest.raises(LrkvError, match=r"blocks.attention.key is not finite"):
        list(head_weights(config, spoilt))
    monkeypatch.delattr(GroupedAttention, "head_weights")
    for heads in (head_weights(config, params), random_heads(config, 1)):
        with pytest.raises(LrkvError, match="^attention.kind = mha cannot be analyzed: give its"):
            next(heads)
