"""Muon's work in a step: the products of the Newton–Schulz iterations."""

import math
from typing import Any

import jax

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.models.transformer import abstract_parameters, specs

# The step sizes at which Muon's share is reported: the paper's, and one of a large run.
MUON_TOKENS = (32_768, 524_288)


def muon(config: RunConfig) -> dict[str, Any]:
    """FLOPs of Newton–Schulz in the run's step, and their share of a step's, ready for JSON."""
    per_token = training_flops_per_token(config.model, config.train.seq_len)
    flops = muon_flops(config.model, config.optimizer.muon.iterations)
    share = {tokens: flops / (per_token * tokens) for tokens in MUON_TOKENS}
    return {"flops": flops, "share": share}


def muon_flops(model: ModelConfig, iterations: int) -> int:
    """FLOPs of the iterations of all matrices, each orthogonalized once."""
    leaves = jax.tree.leaves(abstract_parameters(model))
    total = 0
    for spec, leaf in zip(jax.tree.leaves(specs(model)), leaves, strict=True):
        if spec.group == "matrix":
            count = math.prod(leaf.shape[: spec.batch])  # layers, heads
            rows, columns = spec.fans(leaf.shape)
            total += count * newton_schulz_flops(rows, columns, iterations)
    return total


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> int:
    """FLOPs of one matrix of M × N, M ≤ N: X Xᵀ and (…) X, 2 M² N each, and their square, 2 M³."""
    small, large = sorted((rows, columns))
    return iterations * (4 * small**2 * large + 2 * small**3)
