"""The texts that a conversion learns from, and what they show of each layer, one at a time.

The stream of all calibration tokens waits on the host between two layers, so a device
holds one layer's intermediate values of one batch.

N rows  B rows of a batch  T positions  U = T + 1 ids of a record  D model width
H heads  K head width  J = K / 2 pairs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.data.loader import heldout_batches, make_loader
from lrkv_jax.data.sources import docstrings
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop.fits import Calibration
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.token_batch import BatchFormat

OWN, SECOND = "own", "docstrings"
HELD_OUT = 5  # of a text that is given whole, one part in so many is held out


@dataclass(frozen=True)
class TextRecords:
    """Records of one text: some to learn from, others to measure on."""

    name: str
    learnt_NU: Int[np.ndarray, "N U"]
    heldout_NU: Int[np.ndarray, "N U"]


def texts(
    names: Sequence[str],
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    context: int,
    learnt: int,
    heldout: int,
) -> Iterator[TextRecords]:
    """Each text's records of `context` tokens: up to `learnt` tokens of one part of it,
    and up to `heldout` of another.

    "own" is the run's training and held-out split, "docstrings" those of Python's standard library
    (modules of its two halves), and every other name a file of text, whose last fifth is held out.
    Raises `LrkvError` for a file that cannot be read, or that is too short.
    """
    rows = [max(1, count // context) for count in (learnt, heldout)]
    for name in names:
        if name == OWN:
            loader = make_loader(config.data, context, rows[0])
            batches = heldout_batches(config.data, context, 1, some=rows[1])
            yield TextRecords(name, loader.batch_at(0), np.concatenate(list(batches)))
            continue
        documents = docstrings() if name == SECOND else [_read(name)]
        ids = [np.array([tokenizer.bos, *one]) for one in tokenizer.encode_batch(documents)]
        if name == SECOND:
            parts = np.concatenate(ids[::2]), np.concatenate(ids[1::2])
        else:
            (whole,) = ids
            cut = len(whole) * (HELD_OUT - 1) // HELD_OUT
            parts = whole[:cut], whole[cut:]
        if min(map(len, parts)) <= context:
            raise LrkvError(
                f"{name} has {sum(map(len, parts))} tokens, and one part in {HELD_OUT} of it must "
                f"be longer than {context}: give a longer text, or a smaller --context"
            )
        yield TextRecords(
            name, *(_records(p, context, n) for p, n in zip(parts, rows, strict=True))
        )


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LrkvError(f"--text {name} cannot be read as text ({error})") from error


def _records(ids_N: np.ndarray, context: int, most: int) -> Int[np.ndarray, "N U"]:
    """Records spread evenly over the ids, each beginning with the last id of the one before."""
    count = (len(ids_N) - 1) // context
    chosen = [number * count // min(most, count) for number in range(min(most, count))]
    records = [ids_N[at * context : (at + 1) * context + 1] for at in chosen]
    return np.stack(records).astype(np.int32)


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
