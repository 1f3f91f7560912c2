"""Muon's work in a step: the products of the Newton–Schulz iterations, and how they are shared out.

n matrices  A × B one matrix  M the smaller side, N the larger
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Matrices:
    """Equal matrices of a model: `count` of A × B, orthogonalised one by one.

    `split` is over how many devices their batch axis lies already (heads over `tensor`): those
    devices share out their own part of the batch alone.
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
    """FLOPs of the iterations of all matrices, each orthogonalised once."""
    return sum(g.count * newton_schulz_flops(g.rows, g.columns, iterations) for g in groups)


def muon_flops_per_device(groups: Sequence[Matrices], iterations: int, devices: int) -> int:
    """FLOPs of the busiest device: a group's matrices are dealt out whole, so some get one more."""
    return sum(
        -(-(g.count // g.split) // (devices // g.split))
        * newton_schulz_flops(g.rows, g.columns, iterations)
        for g in groups
    )
