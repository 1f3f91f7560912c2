"""Evaluation of trained runs: held-out loss, decode agreement and benchmarks."""

from lrkv_jax.evaluation.evaluate import evaluate

__all__ = ["evaluate"]
