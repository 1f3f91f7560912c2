"""Weighted statistics are means over the tokens that weighted them; logits are the model's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle, variants
from support.random_heads import D, H, lrkv_heads
from support.variants import ALL, FIVE, HYBRID, WIDTH, error, random_model, small

from lrkv_jax.interop.fits import root
from lrkv_jax.lab.analysis.activations import logit_grams, on_text, weighted
from lrkv_jax.lab.analysis.diversity import gram, normalized
from lrkv_jax.models.weights import weights_of
from lrkv_jax.training.token_batch import BatchFormat


def test_weighted_products_are_means_over_tokens_of_logits_and_of_written_values():
    heads = lrkv_heads()
    x_ND = np.random.default_rng(0).standard_normal((15, D)) * np.linspace(0.1, 3, D)
    moved = weighted(heads, root(x_ND.T @ x_ND / 15))  # of rank 15, less than D
    logits_HNN = (x_ND @ heads.query_HDK) @ (x_ND @ heads.key_HDK).swapaxes(1, 2)
    flat = logits_HNN.reshape(H, -1)
    np.testing.assert_allclose(gram(*moved.query_key()), flat @ flat.T / 15**2, rtol=1e-9)
    left, right = heads.value_output()
    flat = ((x_ND @ left) @ right.swapaxes(1, 2)).reshape(H, -1)
    np.testing.assert_allclose(gram(*moved.value_output()), flat @ flat.T / 15, rtol=1e-9)


def similarity(layer, T=12, segments_BT=None):
    """Cosines of a layer's heads' logits on two random rows."""
    x_BTD = jnp.float32(np.random.default_rng(9).standard_normal((2, T, WIDTH)))
    positions_BT = jnp.broadcast_to(jnp.arange(T), (2, T))
    grams_BHH = jax.jit(lambda: logit_grams(layer, x_BTD, positions_BT, segments_BT))()
    return normalized(np.asarray(grams_BHH, np.float64).sum(axis=0))


@pytest.mark.parametrize(("name", "window"), [("mla", None), ("lrkv-shared-groups", 4)])
def test_logits_similarity_equals_the_equations(name, window):
    """In float64, pair by pair: each query's logits less their mean."""
    config, T = small(ALL[name], window=window), 12
    layer = random_model(config).blocks[0].attention
    weights = {k: np.asarray(w, np.float64) for k, w in weights_of(layer).items()}
    x_BTD = np.random.default_rng(9).standard_normal((2, T, WIDTH))
    segments_BT = np.array([[0] * T, [0] * 5 + [1] * 7])
    grams_HH = np.zeros((config.heads, config.heads))
    norm = partial(oracle.normed, eps=config.norm_eps)
    for x_TD, segments_T in zip(x_BTD, segments_BT, strict=True):
        logits_HTS = [
            oracle.head(config, weights, h, x_TD, np.arange(T), norm)[0]
            for h in range(config.heads)
        ]
        for t, segment in enumerate(segments_T):
            first = 0 if window is None else max(0, t + 1 - window)
            seen = [s for s in range(first, t + 1) if segments_T[s] == segment]
            rows_HS = np.array([logits_TS[t, seen] for logits_TS in logits_HTS])
            rows_HS -= rows_HS.mean(axis=1, keepdims=True)
            grams_HH += rows_HS @ rows_HS.T
    found, truth = similarity(layer, T, jnp.asarray(segments_BT)), normalized(grams_HH)
    np.testing.assert_allclose(found, truth, atol=1e-5)
    assert np.abs(found - np.eye(config.heads)).max() > 0.01


@pytest.mark.slow  # a model is compiled
@pytest.mark.parametrize("hybrid", [False, True])
def test_text_is_met_as_attention_reads_it(hybrid):
    """Layer 0 reads the normed embedding, layer 1 what block 0 makes of it, in documents.

    Of a hybrid layers 1 and 3 are analyzed, which see all positions.
    """
    config = small(FIVE["lrkv"], norm_gain=True, **(HYBRID if hybrid else {}))
    model = random_model(config)
    batches = [variants.random_tokens(3, 9, seed=seed) for seed in (0, 1)]
    rows = BatchFormat(bos=5, separate_documents=True, restart_positions=True)
    found = on_text(config, variants.random_params(config), batches, rows)
    moments_LDD, tokens = found.moments_LDD, found.tokens
    assert tokens == 2 * 3 * 8 and moments_LDD.shape == (2, config.width, config.width)
    totals, logits = np.zeros_like(moments_LDD), np.zeros_like(found.logits_LHH)
    for batch_BU in batches:
        segments_BT = np.cumsum(batch_BU == 5, axis=1)[:, :-1]
        positions_BT = np.zeros_like(segments_BT)
        for b, t in np.ndindex(segments_BT.shape):
            begins = [s for s in range(t + 1) if batch_BU[b, s] == 5]
            positions_BT[b, t] = t - max(begins, default=0)
        x_BTD = np.asarray(model.embedding.table[...])[batch_BU[:, :-1]].astype(np.float64)
        x_BTD /= np.sqrt((x_BTD**2).mean(axis=-1, keepdims=True) + config.norm_eps)
        x_BTD = jnp.float32(x_BTD)
        for layer, block in enumerate(model.blocks):
            read_BTD = block.norm_attention(x_BTD)
            if not hybrid or layer % 2:
                at = layer // 2 if hybrid else layer
                logits[at] += logit_grams(
                    block.attention, read_BTD, jnp.asarray(positions_BT), jnp.asarray(segments_BT)
                ).sum(axis=0)
                read_ND = np.asarray(read_BTD, np.float64).reshape(-1, D)
                totals[at] += read_ND.T @ read_ND
            x_BTD = block(x_BTD, jnp.asarray(positions_BT), jnp.asarray(segments_BT))
    assert error(moments_LDD, totals / tokens) < 1e-5
    assert error(found.logits_LHH, logits) < 1e-5
