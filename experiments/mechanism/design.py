"""The runs of the mechanism's first part and what is asked of them, named before any was made.

LRKV of rank K spans MHA's functions and keeps the whole of LRKV's gain (docs/results.md), so the
gain is in how a factored projection trains. Two things are added to MHA there, a shared path and
factors; the factorial has each alone, both and neither, Muon's matrix being a head's in all four.

Value of a run: bits per byte of `test`, the mean over three kinds of text (`bits_per_byte`). Seeds
are blocks, and one model of variant and seed takes all variants (`lrkv_jax.lab.report.comparison`).
With a
standard deviation of 0.0020 over seeds within a pair, six seeds find 0.005 with probability 0.92.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

# Each variant is trained at these rates, a quarter of its steps, two seeds that no later run has.
# The lowest mean over `tune` is its own rate. Where that is the first or the last, the next of the
# same ratio is tried too, until it is neither.
RATES = (0.01, 0.014, 0.02)
RATE_SEEDS = (100, 101)
STEPS, RATE_STEPS = 1953, 488
SEEDS = (0, 1, 2, 3, 4, 5)

VARIANTS = (
    "mha", "per_head", "shared", "factored", "both", "doubled", "lrkv_full", "lrkv_latent", "mqa",
)  # fmt: skip

# Weights of the variants' means; a negative value says that what stands first has the lower loss.
CONTRASTS: Mapping[str, Mapping[str, float]] = {
    "shared path": {"shared": 0.5, "both": 0.5, "per_head": -0.5, "factored": -0.5},
    "factoring": {"factored": 0.5, "both": 0.5, "per_head": -0.5, "shared": -0.5},
    "interaction": {"both": 1, "per_head": 1, "shared": -1, "factored": -1},
    "both - per head": {"both": 1, "per_head": -1},
    "LRKV-8 full - both": {"lrkv_full": 1, "both": -1},
    "per head - MHA": {"per_head": 1, "mha": -1},
    "rate doubled - per head": {"doubled": 1, "per_head": -1},
    "LRKV-8 latent - LRKV-8 full": {"lrkv_latent": 1, "lrkv_full": -1},
    # |latent - full| - |full - MHA|, if both are the improvements that earlier runs found.
    "rotation - factorisation": {"lrkv_full": 2, "lrkv_latent": -1, "mha": -1},
}
# Two one-sided tests at this margin: does a rank of K / 4 lose nothing?
EQUAL_WITHIN = {"LRKV-8 full - both": 0.003}


@dataclass(frozen=True)
class Planned:
    """A run: what it is named by, and the split that it is judged by."""

    variant: str
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.rate:g}-{self.steps}-seed{self.seed}"


def bits_per_byte(documents: Mapping[str, Sequence[Sequence[float]]]) -> float:
    """The mean over kinds of a kind's bits per byte; a document is (nats, tokens, bytes)."""
    kinds = []
    for rows in documents.values():
        kinds.append(sum(row[0] for row in rows) / (log(2) * sum(row[2] for row in rows)))
    return sum(kinds) / len(kinds)


def planned(tuned: Mapping[tuple[str, float, int], float]) -> list[Planned]:
    """The runs that the design asks for next, in their order, from `tune`'s losses so far.

    `tuned` is {(variant, rate, seed): bits per byte} of the runs of `RATE_STEPS`. First come all
    rates; when a variant's own rate is known, its runs follow, a seed of all variants at a time.
    """
    rates, chosen = [], {}
    for variant in VARIANTS:
        tried = list(RATES)
        while True:
            runs = [
                Planned(variant, rate, seed, RATE_STEPS) for rate in tried for seed in RATE_SEEDS
            ]
            found = {
                rate: [tuned.get((variant, rate, seed)) for seed in RATE_SEEDS] for rate in tried
            }
            if any(None in losses for losses in found.values()):
                break
            best = min(tried, key=lambda rate: sum(found[rate]))
            if best not in (tried[0], tried[-1]):
                chosen[variant] = best
                break
            tried = _wider(tried, best)
        rates += runs
    if len(chosen) < len(VARIANTS):
        return rates
    return rates + [
        Planned(variant, chosen[variant], seed, STEPS) for seed in SEEDS for variant in VARIANTS
    ]


def _wider(tried, best):
    """The rates with one more beside `best`, an end of them: a factor of √2 from it."""
    if best == tried[0]:
        return [_rounded(best / 2**0.5), *tried]
    return [*tried, _rounded(best * 2**0.5)]


def _rounded(rate):
    return float(f"{rate:.2g}")
