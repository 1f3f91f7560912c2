"""Properties of a batch of token ids: documents, positions, and which ids are targets.

Documents start with BOS, so a row needs no second array to separate them. An id that is no target
(padding, or a user's turn, under an assistant's loss) is stored as its complement ~id, which
is negative: rows stay one int32 array from the file to the device.

B rows  U tokens of a row  T = U − 1 positions of inputs
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from lrkv_jax.config import RunConfig


@dataclass(frozen=True)
class BatchFormat:
    """How to read a batch; the default reads ids alone.

    bos: the id that starts a document. separate_documents: documents never see each other.
    restart_positions: positions count from a document's start, not from the row's. masked: ids may
    be complemented.
    """

    bos: int = -1
    separate_documents: bool = False
    restart_positions: bool = False
    masked: bool = False

    @classmethod
    def of(cls, config: RunConfig, bos: int) -> BatchFormat:
        """The format of a run's records under its `train` settings; `bos` is its tokenizer's."""
        train = config.train
        # A mixture names its targets; the last of the epochs fills its batch with what is none.
        masked = config.data.mixture is not None or train.epochs is not None
        return cls(bos, train.document_mask, train.document_positions, masked)

    def ids(self, tokens_BU: Int[Array, "B U"]) -> Int[Array, "B U"]:
        """The ids, whether they are targets or not."""
        return jnp.where(tokens_BU < 0, ~tokens_BU, tokens_BU) if self.masked else tokens_BU

    def counted(self, tokens_BU: Int[Array, "B U"]) -> Bool[Array, "B U"] | None:
        """Which tokens are targets; None where all are."""
        return tokens_BU >= 0 if self.masked else None

    def segments(self, ids_BU: Int[Array, "B U"]) -> Int[Array, "B U"] | None:
        """The number of each token's document in its row; None where documents are joined."""
        return jnp.cumsum(ids_BU == self.bos, axis=1) if self.separate_documents else None

    def positions(self, ids_BU: Int[Array, "B U"]) -> Int[Array, "B U"] | None:
        """Each token's position in its document; None where the row's positions are meant."""
        if not self.restart_positions:
            return None
        places_BU = jnp.broadcast_to(jnp.arange(ids_BU.shape[1]), ids_BU.shape)
        starts_BU = jnp.where(ids_BU == self.bos, places_BU, 0)
        return places_BU - jax.lax.cummax(starts_BU, axis=1)


PLAIN = BatchFormat()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """A device's share of a batch: its rows b, its positions t of them."""

    inputs_bt: Int[Array, "b t"]
    targets_bt: Int[Array, "b t"]
    counted_bt: Bool[Array, "b t"] | None  # targets that the loss is made of; None: all
    positions_bt: Int[Array, "b t"] | None  # None: those of the row
    segments_bt: Int[Array, "b t"] | None  # None: one document

    @classmethod
    def read(
        cls, tokens_bU: Int[Array, "b U"], batch_format: BatchFormat, first: Array | int, size: int
    ) -> TokenBatch:
        """Positions `first` to first + size − 1 of whole rows."""

        def here(x_bU, offset=0):
            if x_bU is None:
                return None
            return jax.lax.dynamic_slice_in_dim(x_bU, first + offset, size, axis=1)

        ids_bU = batch_format.ids(tokens_bU)
        return cls(
            here(ids_bU),
            here(ids_bU, 1),
            here(batch_format.counted(tokens_bU), 1),
            here(batch_format.positions(ids_bU)),
            here(batch_format.segments(ids_bU)),
        )
