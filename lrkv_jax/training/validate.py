"""Cross-entropy and bits per byte on held-out records.

B sequences  T positions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lrkv_jax.config import ModelConfig
from lrkv_jax.distributed.rules import batch_sharding, global_batch, replicated
from lrkv_jax.training.loss import bits_per_byte, make_loss
from lrkv_jax.training.token_batch import PLAIN, BatchFormat


@dataclass(frozen=True)
class HeldOutLoss:
    """Means over held-out tokens of text: specials and padding count nowhere.

    `cross_entropy` is nats a token, `bits_per_byte` bits per UTF-8 byte of the text. Both are NaN
    where no token counts.
    """

    cross_entropy: float
    bits_per_byte: float
    tokens: int
    bytes: int


def make_validation(
    config: ModelConfig,
    mesh: Mesh,
    token_bytes_V: np.ndarray,
    *,
    chunk: int,
    batch_format: BatchFormat = PLAIN,
) -> Callable[[Any, Iterable[np.ndarray]], HeldOutLoss]:
    """A function (params, batches of int32 [B, T + 1]) → `HeldOutLoss`.

    Each row is summed on device in float32 and the rows on the host in float64, so the result
    does not depend on how records are batched. Batches that the mesh's batch axes do not divide
    are filled up with rows of token 0 that count nowhere; nor do tokens that are no targets.
    """
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    bytes_of = jnp.asarray(token_bytes_V)
    losses = make_loss(config, mesh, chunk=chunk, batch_format=batch_format)

    def bytes_at(tokens_BT, bytes_V):
        # A complemented id, which is no target, is negative: it has no bytes.
        return bytes_V[tokens_BT] * (tokens_BT >= 0)

    def row_nats(params, tokens_BU):
        nll_BT = losses(params, tokens_BU)
        return jnp.sum(nll_BT * (bytes_at(tokens_BU[:, 1:], bytes_of) > 0), axis=1)

    row_nats = jax.jit(
        row_nats, in_shardings=(None, batch_sharding(mesh)), out_shardings=replicated(mesh)
    )

    def validate(params: Any, batches: Iterable[np.ndarray]) -> HeldOutLoss:
        nats, tokens, num_bytes = 0.0, 0, 0
        with jax.set_mesh(mesh):
            for tokens_BU in batches:
                bytes_BT = bytes_at(tokens_BU[:, 1:], token_bytes_V)
                here = len(tokens_BU)
                padded = np.pad(tokens_BU, ((0, -here % devices), (0, 0)))
                sums_B = row_nats(params, global_batch(batch_sharding(mesh), padded))
                nats += float(np.asarray(sums_B, np.float64)[:here].sum())
                tokens += int((bytes_BT > 0).sum())
                num_bytes += int(bytes_BT.sum())
        if not tokens:
            return HeldOutLoss(math.nan, math.nan, 0, 0)
        return HeldOutLoss(
            cross_entropy=nats / tokens,
            bits_per_byte=float(bits_per_byte(nats, num_bytes)),
            tokens=tokens,
            bytes=num_bytes,
        )

    return validate
