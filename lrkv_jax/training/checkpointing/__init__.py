"""Checkpoints that can be trusted: saved through Orbax, sealed, verified, and never half there."""

from lrkv_jax.training.checkpointing.checkpointer import Checkpointer
from lrkv_jax.training.checkpointing.manifest import Damaged

__all__ = ["Checkpointer", "Damaged"]
