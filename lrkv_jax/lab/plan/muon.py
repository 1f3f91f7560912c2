"""Muon's work in a step: the products of Newton–Schulz, and how devices share them.

A × B one matrix  M its smaller side, N its larger side
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.lab.plan.estimate import sizes_of
from lrkv_jax.models.accounting.counts import training_flops_per_token
from lrkv_jax.models.transformer import abstract_parameters, specs
from lrkv_jax.optim.spread import layout_of

# The step sizes at which Muon's share is reported: the paper's, and one of a large run.
MUON_TOKENS = (32_768, 524_288)


@dataclass(frozen=True)
class Matrices:
    """Equal matrices of a model: `count` of A × B, orthogonalized one by one.

    `split` is the number of devices over which their batch axis lies already (heads over `tensor`):
    each of those devices shares only its part of the batch.
    """

    rows: int
    columns: int
    count: int
    split: int = 1


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> int:
    """FLOPs of one matrix: X Xᵀ and (…) X, 2 M² N each, and the Gram matrix squared, 2 M³."""
    small, large = sorted((rows, columns))
    return iterations * (4 * small**2 * large + 2 * small**3)


def muon_flops(groups: Sequence[Matrices], iterations: int) -> int:
    """FLOPs of the iterations of all matrices, each orthogonalized once."""
    return sum(g.count * newton_schulz_flops(g.rows, g.columns, iterations) for g in groups)


def muon_flops_per_device(groups: Sequence[Matrices], iterations: int, devices: int) -> int:
    """FLOPs of the busiest device; matrices are not divided, so some devices get one more."""
    return sum(
        -(-(g.count // g.split) // (devices // g.split))
        * newton_schulz_flops(g.rows, g.columns, iterations)
        for g in groups
    )


def muon(config: RunConfig) -> dict[str, Any]:
    """What Newton–Schulz takes of the run's step, ready for JSON; every mesh axis has a size."""
    sizes, iterations = sizes_of(config.mesh), config.optimizer.muon.iterations
    groups, devices = matrices(config.model, sizes), math.prod(sizes.values())
    per_token = training_flops_per_token(config.model, config.train.context)
    flops = muon_flops(groups, iterations)
    return {
        "flops": flops,
        "flops_busiest_device": muon_flops_per_device(groups, iterations, devices),
        "share": {tokens: flops / (per_token * tokens) for tokens in MUON_TOKENS},
    }


def matrices(model: ModelConfig, sizes: dict[str, int]) -> list[Matrices]:
    """The matrices that Muon orthogonalizes, in the groups that the step shares out."""
    mesh = SimpleNamespace(shape=sizes)
    groups: dict[Any, int] = {}
    for spec, leaf in _weights(model):
        if spec.group == "matrix" and math.prod(leaf.shape):
            layout = layout_of(spec, leaf.shape, mesh)
            count = math.prod(leaf.shape[: spec.batch])
            groups[layout[1:]] = groups.get(layout[1:], 0) + count
    return [
        Matrices(rows, columns, count, math.prod(sizes[axis] for axis in batch_axes))
        for (rows, columns, batch_axes, *_), count in groups.items()
    ]


@functools.lru_cache(maxsize=8)
def _weights(model: ModelConfig) -> list[tuple[Any, Any]]:
    leaves = jax.tree.leaves(abstract_parameters(model))
    return list(zip(jax.tree.leaves(specs(model)), leaves, strict=True))
