"""Checkpoints that are written whole, checksummed, and verified when they are restored."""

from lrkv_jax.training.checkpointing.checkpointer import Checkpointer
