"""The same statistics on the inputs that text makes: forms weighted by the stream's second moments.

With C = E[x xᵀ] of the inputs of a layer's attention, ⟨A_i, A_j⟩_C = tr(A_iᵀ C A_j C) is the mean
over two independent tokens x, y of (x A_i yᵀ)(x A_j yᵀ): cosines become correlations of the logits
at offset zero. It is the plain inner product of forms whose factors are C^½ W, and so everything
else is the same function.

B rows  T positions  L layers  D model width
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lrkv_jax.attention.head_weights import HeadWeights, SharedResidual
from lrkv_jax.config import ModelConfig
from lrkv_jax.model import with_parameters
from lrkv_jax.train.rows import PLAIN, RowFormat


class _Recorder:
    """A norm that keeps the sum of x xᵀ over the tokens that it has normed."""

    def __init__(self, norm):
        self._norm = norm

    def __call__(self, x_BTD):
        y_BTD = self._norm(x_BTD)
        wide_BTD = y_BTD.astype(jnp.float32)
        self.sum_DD = jnp.einsum("BTD,BTE->DE", wide_BTD, wide_BTD)
        return y_BTD


def second_moments(
    config: ModelConfig, params: Any, batches: Iterable[np.ndarray], rows: RowFormat = PLAIN
) -> tuple[Float[np.ndarray, "L D D"], int]:
    """(E[x xᵀ] of the inputs of each layer's attention, the tokens that it is a mean over).

    `batches` are rows of a run's records, int32 [B, T + 1], which `rows` says how to read; sums are
    float32 within a batch and float64 over batches.
    """

    @jax.jit
    def sums(params, tokens_BU):
        ids_BU = rows.ids(tokens_BU)
        ids_BT = ids_BU[:, :-1]
        positions_BU, segments_BU = _places(rows, ids_BU)
        model = with_parameters(config, params).unstacked()
        recorders = [_Recorder(block.norm_attention) for block in model.blocks]
        for block, recorder in zip(model.blocks, recorders, strict=True):
            block.norm_attention = recorder
        model.hidden(ids_BT, positions_BU, segments_BU)
        return jnp.stack([recorder.sum_DD for recorder in recorders])

    total_LDD, tokens = np.zeros((config.layers, config.width, config.width)), 0
    for batch_BU in batches:
        total_LDD += np.asarray(sums(params, batch_BU), np.float64)
        tokens += batch_BU.shape[0] * (batch_BU.shape[1] - 1)
    return total_LDD / tokens, tokens


def _places(rows, ids_BU):
    """Positions and documents of the inputs, or None each."""
    found = rows.positions(ids_BU), rows.segments(ids_BU)
    return [None if each is None else each[:, :-1] for each in found]


def root(moment_DD: Float[np.ndarray, "D D"]) -> Float[np.ndarray, "D D"]:
    """The symmetric square root of a second moment; what rounding made negative counts as zero."""
    values_D, vectors_DD = np.linalg.eigh(moment_DD)
    return (vectors_DD * np.sqrt(np.maximum(values_D, 0.0))) @ vectors_DD.T


def weighted(heads: HeadWeights, root_DD: Float[np.ndarray, "D D"]) -> HeadWeights:
    """The heads whose plain statistics are the weighted ones: C^½ before all that reads the input.

    The output projection is as it was: what it writes is compared in the stream's own coordinates.
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
