"""Additions to the paper: variants by learning rate, and each at its best.

At one learning rate for all, a variant may gain from it. A variant's rate is that of the lowest
mean loss over the seeds that all its rates have run. For every variant, it is chosen by some of the
runs that are then compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lrkv_jax.lab.report.comparison.contrasts import mean_and_sd
from lrkv_jax.lab.report.comparison.runs import RunRecord, alike, check_not_mixed
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow
from lrkv_jax.models.accounting.counts import cache_fraction

RATES_NOTE = (
    "Bits per byte on the whole held-out split at the end of training, mean ± standard deviation "
    "over the seeds that all rates of a variant have run. Its rate has the lowest mean; † it is "
    "the smallest or the largest that was tried, so that a better may lie beyond."
)
RATE = "optimizer.matrix_lr"


@dataclass(frozen=True)
class TunedVariant:
    """One variant's finished runs at each rate that it was trained at: {rate: {seed: run}}."""

    by_rate: Mapping[float, Mapping[int, RunRecord]]

    @cached_property
    def bits(self) -> Mapping[float, Mapping[int, float | None]]:
        """{rate: {seed: bits per byte}}, of the seeds that all rates have run, if there are any."""
        shared = set.intersection(*(set(runs) for runs in self.by_rate.values()))
        return {
            rate: {seed: _at_end(runs[seed]) for seed in sorted(shared or runs)}
            for rate, runs in self.by_rate.items()
        }

    @cached_property
    def rate(self) -> float:
        """The best of those that were tried; one at which a run diverged is the worst."""
        means = {
            rate: math.inf if None in bits.values() else mean_and_sd(bits.values())[0]
            for rate, bits in self.bits.items()
        }
        return min(means, key=means.__getitem__)

    @property
    def at_edge(self) -> bool:
        """Whether the rate is the smallest or the largest tried, so that a better may lie beyond.

        Of a variant that was trained at one rate alone nothing was chosen.
        """
        return self.swept and self.rate in (min(self.by_rate), max(self.by_rate))

    @property
    def swept(self) -> bool:
        """Whether the variant was trained at several rates; otherwise its rate was not chosen."""
        return len(self.by_rate) > 1

    @property
    def runs(self) -> Mapping[int, RunRecord]:
        """The runs at the chosen rate, by seed."""
        return self.by_rate[self.rate]


@dataclass(frozen=True)
class TunedFamily:
    """Variants that differ in variant, seed and learning rate alone, under their setting's name."""

    name: str
    variants: Mapping[str, TunedVariant]


def families(runs: Sequence[RunRecord]) -> list[TunedFamily]:
    """Finished runs of text by what they may be compared with, each variant with its rate.

    A run that the guard ended counts too: it has no loss. Raises `LrkvError` as `settings` does.
    """
    found = []
    for name, members in alike([run for run in runs if not run.midtrained], free=(RATE,)):
        by_label: dict[str, dict[float, dict[int, RunRecord]]] = {}
        for run in members:
            if run.finished or run.diverged:
                rate = run.config.optimizer.matrix_lr
                seeds = by_label.setdefault(run.label, {}).setdefault(rate, {})
                check_not_mixed(run, seeds.setdefault(run.seed, run))
        if by_label:
            variants = {label: TunedVariant(by_rate) for label, by_rate in by_label.items()}
            found.append(TunedFamily(name, variants))
    return found


@report_item("Beside the paper", "Learning rates")
def learning_rates(runs):
    """Each variant at several learning rates of the matrices, and the best of them."""
    tables = []
    for family in families(runs):
        swept = {label: one for label, one in family.variants.items() if one.swept}
        if swept:
            tables.append(_rate_table(family.name, swept, str(len(tables) or "")))
    return tables


def _rate_table(name: str, variants: Mapping[str, TunedVariant], number: str) -> Table:
    rates = sorted({rate for variant in variants.values() for rate in variant.by_rate})
    at = [Column(f"{rate:g}", digits=4, group="bits per byte at rate") for rate in rates]
    rows = []
    for label, variant in variants.items():
        cells = [Cell.over(variant.bits.get(rate, {})) for rate in rates]
        rows.append(TableRow.of(label, *cells, f"{variant.rate:g}{' †' * variant.at_edge}"))
    columns = [Column("variant"), *at, Column("rate")]
    return Table(f"{name}: learning rates", columns, rows, [RATES_NOTE], name=number)


TEXTS = {"bpb": "held-out text", "docstrings": "second text"}

VARIANTS = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("cache", "% of MHA's bytes", digits=1),
    Column("rate"),
    Column("seeds", digits=0),
    *(Column(text, "bits/byte", "lower", 4) for text in TEXTS.values()),
]
VARIANTS_NOTE = (
    "Each variant at its learning rate (the table of learning rates), on the whole held-out split "
    "and on docstrings of Python's standard library; mean ± standard deviation over seeds. Not "
    "swept: trained at this rate alone. Cache: bfloat16, as allocated."
)


@report_item("Beside the paper", "The family, each variant at its own learning rate")
def family(runs):
    """The variants, each at its best learning rate."""
    found = [one for one in families(runs) if len(one.variants) > 1]
    return [_variants(one, str(number or "")) for number, one in enumerate(found)]


def _variants(family: TunedFamily, number: str) -> Table:
    rows = []
    for label, variant in family.variants.items():
        first = next(iter(variant.runs.values()))
        rows.append(
            TableRow.of(
                label, 100 * cache_fraction(first.config.model),
                100 * first.cache_allocated_fraction,
                f"{variant.rate:g}{'' if variant.swept else ', not swept'}", len(variant.runs),
                *(Cell.over(bits(variant, text)) for text in TEXTS),
            )
        )  # fmt: skip
    title = f"{family.name}: variants at their rates"
    return Table(title, VARIANTS, rows, [VARIANTS_NOTE], name=number)


def bits(variant: TunedVariant, text: str) -> dict[int, float | None]:
    """Bits per byte by seed: of the end of training, or of the runs evaluated on a second text."""
    if text == "bpb":
        return {seed: _at_end(run) for seed, run in variant.runs.items()}
    return {
        seed: run.final_evaluation[text]["bits_per_byte"]
        for seed, run in variant.runs.items()
        if text in run.final_evaluation
    }


def _at_end(run: RunRecord) -> float | None:
    """Bits per byte of the end of training, which a run that diverged has not."""
    return None if run.diverged else run.bits_per_byte
