"""Checkpoints that can be trusted: checksummed, verified, and never half there."""

from lrkv_jax.training.checkpointing.checkpointer import Checkpointer
from lrkv_jax.training.checkpointing.layout import Damaged

__all__ = ["Checkpointer", "Damaged"]
