"""Weighted statistics are means over the tokens that weighted them."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.random_heads import D, H, lrkv_heads
from support.variants import FIVE, error, random_model, random_params, random_tokens, small

from lrkv_jax.analysis.activations import root, second_moments, weighted
from lrkv_jax.analysis.diversity import gram
from lrkv_jax.train.rows import RowFormat


def test_weighted_products_are_mean_products_of_logits_over_pairs_of_tokens():
    heads = lrkv_heads()
    x_ND = np.random.default_rng(0).standard_normal((15, D)) * np.linspace(0.1, 3, D)
    logits_HNN = (x_ND @ heads.query_HDK) @ (x_ND @ heads.key_HDK).swapaxes(1, 2)
    flat = logits_HNN.reshape(H, -1)
    moved = weighted(heads, root(x_ND.T @ x_ND / 15))  # of rank 15, less than D
    np.testing.assert_allclose(gram(*moved.query_key()), flat @ flat.T / 15**2, rtol=1e-9)


def test_weighted_values_are_what_tokens_write():
    heads = lrkv_heads()
    x_ND = np.random.default_rng(1).standard_normal((40, D))
    left, right = heads.value_output()
    flat = ((x_ND @ left) @ right.swapaxes(1, 2)).reshape(H, -1)
    moved = weighted(heads, root(x_ND.T @ x_ND / 40))
    np.testing.assert_allclose(gram(*moved.value_output()), flat @ flat.T / 40, rtol=1e-9)


def test_weighting_moves_parts_and_whole_alike():
    moved = weighted(lrkv_heads(), np.diag(np.linspace(0, 2, D)))
    np.testing.assert_allclose(moved.key_parts.total_HDK, moved.key_HDK, atol=1e-12)
    np.testing.assert_allclose(moved.value_parts.total_HDK, moved.value_HDK, atol=1e-12)


@pytest.mark.slow  # a model is compiled
def test_second_moments_are_of_what_attention_reads():
    """Layer 0 reads the normed embedding, layer 1 what block 0 makes of it, in documents."""
    config = small(FIVE["lrkv"], norm_gain=True)
    model = random_model(config)
    batches = [random_tokens(3, 9, seed=seed) for seed in (0, 1)]
    rows = RowFormat(bos=5, apart=True, restart=True)
    found, tokens = second_moments(config, random_params(config), batches, rows)
    assert tokens == 2 * 3 * 8 and found.shape == (2, config.width, config.width)
    totals = np.zeros_like(found)
    for batch_BU in batches:
        segments_BT = np.cumsum(batch_BU == 5, axis=1)[:, :-1]
        positions_BT = np.zeros_like(segments_BT)
        for b, t in np.ndindex(segments_BT.shape):
            begins = [s for s in range(t + 1) if batch_BU[b, s] == 5]
            positions_BT[b, t] = t - max(begins, default=0)
        x_BTD = np.asarray(model.embedding.table[...])[batch_BU[:, :-1]].astype(np.float64)
        x_BTD /= np.sqrt((x_BTD**2).mean(axis=-1, keepdims=True) + config.norm_eps)
        x_BTD = jnp.float32(x_BTD)
        for at, block in enumerate(model.blocks):
            read_BTD = np.asarray(block.norm_attention(x_BTD), np.float64).reshape(-1, D)
            totals[at] += read_BTD.T @ read_BTD
            x_BTD = block(x_BTD, jnp.asarray(positions_BT), jnp.asarray(segments_BT))
    assert error(found, totals / tokens) < 1e-5
