"""Variants each at its best learning rate: at one rate for all, a variant may gain from it.

A variant's rate is that of the lowest mean loss over the seeds that all its rates have
run. It is chosen by some of the runs that are then compared, for every variant alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lrkv_jax.lab.report.comparison.contrasts import spread
from lrkv_jax.lab.report.comparison.runs import RunRecord, alike

RATE = "optimizer.matrix_lr"


@dataclass(frozen=True)
class TunedVariant:
    """One variant's finished runs at each rate that it was trained at: {rate: {seed: run}}."""

    label: str
    by_rate: Mapping[float, Mapping[int, RunRecord]]

    @cached_property
    def bits(self) -> Mapping[float, Mapping[int, float]]:
        """{rate: {seed: bits per byte}}, of the seeds that all rates have run, if there are any."""
        shared = set.intersection(*(set(runs) for runs in self.by_rate.values()))
        return {
            rate: {seed: runs[seed].bits_per_byte or 0.0 for seed in sorted(shared or runs)}
            for rate, runs in self.by_rate.items()
        }

    @cached_property
    def rate(self) -> float:
        """The best of those that were tried."""
        means = {rate: spread(list(bits.values())).mean for rate, bits in self.bits.items()}
        return min(means, key=means.__getitem__)

    @property
    def at_edge(self) -> bool:
        """Whether its rate is the smallest or the largest tried, so that a better may lie beyond.

        Of a variant that was trained at one rate alone nothing was chosen.
        """
        return self.swept and self.rate in (min(self.by_rate), max(self.by_rate))

    @property
    def swept(self) -> bool:
        """Whether it was trained at several rates; otherwise its rate was not chosen."""
        return len(self.by_rate) > 1

    @property
    def runs(self) -> Mapping[int, RunRecord]:
        """Those at its rate, by seed."""
        return self.by_rate[self.rate]


@dataclass(frozen=True)
class TunedFamily:
    """Variants that differ in variant, seed and learning rate alone, under their setting's name."""

    name: str
    variants: Mapping[str, TunedVariant]

    @property
    def choosing(self) -> set[int]:
        """The seeds by which some variant's rate was chosen."""
        swept = [variant for variant in self.variants.values() if variant.swept]
        return {seed for variant in swept for bits in variant.bits.values() for seed in bits}

    def named(self, name: str) -> TunedVariant | None:
        """The variant that configurations list under this name."""
        for variant in self.variants.values():
            if any(run.variant == name for run in variant.runs.values()):
                return variant
        return None


def families(runs: Sequence[RunRecord]) -> list[TunedFamily]:
    """Finished runs of text by what they may be compared with, each variant with its rate."""
    found = []
    for name, members in alike([run for run in runs if not run.midtrained], free=(RATE,)):
        by_label: dict[str, dict[float, dict[int, RunRecord]]] = {}
        for run in members:
            if run.finished:
                rate = run.config.optimizer.matrix_lr
                by_label.setdefault(run.label, {}).setdefault(rate, {}).setdefault(run.seed, run)
        if by_label:
            variants = {label: TunedVariant(label, by_rate) for label, by_rate in by_label.items()}
            found.append(TunedFamily(name, variants))
    return found
