"""Evaluation of trained runs: held-out loss, decode agreement, and the n-gram it must beat."""

from lrkv_jax.evals.evaluate import evaluate

__all__ = ["evaluate"]
