"""What text shows of each layer's inputs and queries, a layer at a time.

The stream of all calibration tokens waits on the host between two layers, so a device
holds one layer's intermediate values of one batch.

N rows  B rows of a batch  T positions  D model width  H heads  K head width  J = K / 2 pairs
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lrkv_jax.config import ModelConfig
from lrkv_jax.interop.fits import Calibration
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.token_batch import BatchFormat


def calibrations(
    config: ModelConfig,
    params: Any,
    rows_NU: Int[np.ndarray, "N T+1"],
    how: BatchFormat,
    *,
    batch: int = 8,
) -> Iterator[Calibration]:
    """`Calibration` of each layer on rows as records are, first layer to last.

    Complemented ids are read like any: they are tokens that a layer sees, but no targets. Sums are
    float32 within a batch and float64 over batches. What fills the last batch counts nowhere.
    """
    ids_NU = np.where(rows_NU < 0, ~rows_NU, rows_NU)
    N, T = len(ids_NU), ids_NU.shape[1] - 1
    starts = range(0, N, batch)
    padded_NU = np.pad(ids_NU, ((0, -N % batch), (0, 0)))
    model = with_parameters(config, params)

    @jax.jit
    def embed(model, ids_BU):
        return model.embed(ids_BU[:, :-1])

    @partial(jax.jit, donate_argnums=2)
    def layer(blocks, at, x_BTD, ids_BU, counted_B):
        block = jax.tree.map(lambda leaf: leaf[at], blocks)
        positions_BU, segments_BU = how.positions(ids_BU), how.segments(ids_BU)
        positions_BT = jnp.broadcast_to(jnp.arange(T), (batch, T))
        if positions_BU is not None:
            positions_BT = positions_BU[:, :-1]
        segments_BT = None if segments_BU is None else segments_BU[:, :-1]
        read_BTD, attention = block.norm_attention(x_BTD), block.attention
        counted_BTD = read_BTD.astype(jnp.float32) * counted_B[:, None, None]
        moment_DD = jnp.einsum("BTD,BTE->DE", counted_BTD, counted_BTD)
        q_BTHK = attention.expand_query(attention.queries(read_BTD, positions_BT), positions_BT)
        squares_HK = jnp.einsum("BTHK,B->HK", q_BTHK.astype(jnp.float32) ** 2, counted_B)
        first_HJ, second_HJ = jnp.split(squares_HK, 2, axis=1)
        return block(x_BTD, positions_BT, segments_BT), moment_DD, first_HJ + second_HJ

    counted = [np.float32(np.arange(start, start + batch) < N) for start in starts]
    batches = [padded_NU[start : start + batch] for start in starts]
    with jax.default_matmul_precision("highest"):
        stream = [np.asarray(embed(model, ids_BU)) for ids_BU in batches]
        for at in range(config.layers):
            moment_DD = np.zeros((config.width, config.width))
            energy_HJ = np.zeros((config.heads, config.head_width // 2))
            for number, (ids_BU, counted_B) in enumerate(zip(batches, counted, strict=True)):
                x_BTD, moment, energy = layer(model.blocks, at, stream[number], ids_BU, counted_B)
                stream[number] = np.asarray(x_BTD)
                moment_DD = moment_DD + np.asarray(moment, np.float64)
                energy_HJ = energy_HJ + np.asarray(energy, np.float64)
            gain = model.blocks.attention.key_gain
            gain_K = None if gain is None else np.asarray(gain[at], np.float64)
            yield Calibration(moment_DD / (N * T), energy_HJ / (N * T), gain_K)
