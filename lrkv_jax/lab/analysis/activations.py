"""Heads on the inputs that text makes: forms weighted by the stream's second moments, and logits.

With C = E[x xᵀ] of the inputs of a layer's attention, ⟨A_i, A_j⟩_C = tr(A_iᵀ C A_j C) is the mean
over two independent tokens x, y of (x A_i yᵀ)(x A_j yᵀ): cosines become correlations of the logits
at offset zero. It is the plain inner product of forms whose factors are C^½ W, and so everything
else is the same function. Offset zero, unnormed, is not what softmax sees; `logit_grams` is.

B rows  T queries  S keys  L layers  D model width  H heads  G key heads  W width of a logit
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lrkv_jax.config import ModelConfig
from lrkv_jax.models.attention.base import Attention
from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual
from lrkv_jax.models.transformer import Unstacked, main_layers, with_parameters
from lrkv_jax.training.token_batch import PLAIN, BatchFormat


class OnText(NamedTuple):
    """E[x xᵀ] of the inputs of each layer's attention, the sums of its heads'
    `logit_grams`, and how many tokens both are over."""

    moments_LDD: Float[np.ndarray, "L D D"]
    logits_LHH: Float[np.ndarray, "L H H"]
    tokens: int


def on_text(
    config: ModelConfig, params: Any, batches: Iterable[np.ndarray], rows: BatchFormat = PLAIN
) -> OnText:
    """Statistics of the layers that `head_weights` has, from a forward pass over each of `batches`.

    `batches` are rows of a run's records, int32 [B, T + 1], in the format `rows`. Moments
    are summed in float32 within a batch, logits' products within a row; all else is float64.
    """
    analyzed = main_layers(config)

    @jax.jit
    def sums(params, tokens_BU):
        ids_BU = rows.ids(tokens_BU)
        ids_BT = ids_BU[:, :-1]
        positions_BT, segments_BT = (
            None if each is None else each[:, :-1]
            for each in (rows.positions(ids_BU), rows.segments(ids_BU))
        )
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
        model = Unstacked(with_parameters(config, params))
        x_BTD, moments, grams = model.embed(ids_BT), [], []
        for layer, block in enumerate(model.blocks):
            if layer in analyzed:
                read_BTD = block.norm_attention(x_BTD).astype(jnp.float32)
                moments.append(jnp.einsum("BTD,BTE->DE", read_BTD, read_BTD))
                grams.append(logit_grams(block.attention, read_BTD, positions_BT, segments_BT))
            x_BTD = block(x_BTD, positions_BT, segments_BT)
        return jnp.stack(moments), jnp.stack(grams)

    L, D, H = len(analyzed), config.width, config.heads
    moments_LDD, logits_LHH, tokens = np.zeros((L, D, D)), np.zeros((L, H, H)), 0
    for batch_BU in batches:
        batch_LDD, rows_LBHH = sums(params, batch_BU)
        moments_LDD += np.asarray(batch_LDD, np.float64)
        logits_LHH += np.asarray(rows_LBHH, np.float64).sum(axis=1)
        tokens += batch_BU.shape[0] * (batch_BU.shape[1] - 1)
    return OnText(moments_LDD / tokens, logits_LHH, tokens)


def logit_grams(
    attention: Attention,
    x_BTD: Float[Array, "B T D"],
    positions_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B H H"]:
    """⟨L_i, L_j⟩ of every two heads' logits in each row of a batch, in float32.

    L_h [T, S] is what softmax sees: rotated and normed, of the keys that are neither later nor in
    another document, and less each query's mean over those keys, which softmax does not depend on.
    The layer's `scale`, the same for all heads, is left out. A row at a time, H · T · S logits.
    """
    x_BTD = x_BTD.astype(jnp.float32)
    if segments_BT is None:
        segments_BT = jnp.zeros_like(positions_BT)

    def of_row(row):
        q_THW, k_SGW, segments_T = row
        (T, H, _), G = q_THW.shape, k_SGW.shape[1]
        k_SHW = jnp.repeat(k_SGW, H // G, axis=1)
        logits_HTS = jnp.einsum("THW,SHW->HTS", q_THW, k_SHW)
        seen_TS = jnp.tri(T, dtype=bool) & (segments_T[:, None] == segments_T)
        if (window := attention.config.window) is not None:
            seen_TS &= ~jnp.tri(T, k=-window, dtype=bool)
        mean_HT1 = jnp.mean(logits_HTS, axis=2, keepdims=True, where=seen_TS)
        flat_HN = jnp.where(seen_TS, logits_HTS - mean_HT1, 0).reshape(H, -1)
        return flat_HN @ flat_HN.T

    with jax.default_matmul_precision("highest"):
        q_BTHW = attention.expand_query(attention.queries(x_BTD, positions_BT), positions_BT)
        cache = attention.new_kv(x_BTD, positions_BT)
        k_BSGW, _ = attention.materialize_kv(cache, positions_BT)
        return jax.lax.map(of_row, (q_BTHW, k_BSGW, segments_BT))


def weighted(heads: HeadWeights, root_DD: Float[np.ndarray, "D D"]) -> HeadWeights:
    """The heads whose plain statistics are the weighted ones: C^½ before all that reads the input.

    The output projection is as it was: what it writes is compared in the stream's coordinates.
    """

    def read(matrix):
        return None if matrix is None else root_DD @ matrix

    def parts(split):
        if split is None:
            return None
        return SharedResidual(read(split.shared_DK), read(split.down_HDR), split.up_HRK)

    return replace(
        heads,
        query_HDK=read(heads.query_HDK), key_HDK=read(heads.key_HDK),
        value_HDK=read(heads.value_HDK), query_rope_HDP=read(heads.query_rope_HDP),
        rope_key_DP=read(heads.rope_key_DP), key_parts=parts(heads.key_parts),
        value_parts=parts(heads.value_parts),
    )  # fmt: skip
