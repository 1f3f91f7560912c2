"""Additions to the paper: variants by learning rate, and by contrast.

At one learning rate for all, a variant may gain from it. A variant's rate is that of the lowest
mean loss over the seeds that all its rates have run. For every variant, it is chosen by some of the
runs that are then compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lrkv_jax.lab.report.comparison import (
    Contrast,
    RunRecord,
    combined,
    contrasts,
    mean_and_sd,
    steps_saved_by_seed,
)
from lrkv_jax.lab.report.comparison.contrasts import Values
from lrkv_jax.lab.report.comparison.runs import alike
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

    label: str
    by_rate: Mapping[float, Mapping[int, RunRecord]]

    @cached_property
    def bits(self) -> Mapping[float, Mapping[int, float | None]]:
        """{rate: {seed: bits per byte}}, of the seeds that all rates have run, if there are any."""
        shared = set.intersection(*(set(runs) for runs in self.by_rate.values()))
        return {
            rate: {seed: runs[seed].bits_per_byte for seed in sorted(shared or runs)}
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


# By the names that configs/nano_family.yaml gives its variants.
NAMED = (
    ("lrkv_latent", "mha"),
    ("lrkv_latent", "lrkv_full"),
    ("lrkv_shared", "lrkv_full"),
    ("mla_full", "mla"),
    ("mla_full", "mha"),
    ("lrkv_latent_tied_16", "lrkv_latent_third"),  # at equal bytes
)
NAMED_ON = "2026-11-23T04:15:29+00:00"  # the commit that has them first
# Comparisons that readers requested afterwards.
LATER = (("lrkv_full", "mha"),)
ROTATION, FACTORIZATION = ("lrkv_full", "lrkv_latent"), ("mha", "lrkv_full")
# Bits per byte: differences below it would change nobody's choice.
MARGIN = 0.005
TEXTS = {"bpb": "held-out text", "docstrings": "second text"}

VARIANTS = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("cache", "% of MHA's bytes", digits=1),
    Column("rate"),
    Column("seeds", digits=0),
    *(Column(text, "bits/byte", "lower", 4) for text in TEXTS.values()),
]
CONTRASTS = [
    Column("contrast"),
    Column("difference", "bits/byte"),
    Column("verdict"),
    Column(f"equal within {MARGIN}"),
    Column("by seeds that chose no rate", "bits/byte"),
    Column("on the second text", "bits/byte"),
    Column("sooner", "% of steps", digits=1),
]
VARIANTS_NOTE = (
    "Each variant at its learning rate (the table of learning rates), on the whole held-out split "
    "and on docstrings of Python's standard library; mean ± standard deviation over seeds. Not "
    "swept: trained at this rate alone. Cache: bfloat16, as allocated."
)
CONTRASTS_NOTE = (
    "First minus second, with a 95 % interval, from one model of all variants and seeds. p is "
    "adjusted by Holm within a block. Not found: the number is the smallest difference that such "
    "runs detect with a power of 0.8. Equal: p of two one-sided tests. Sooner: the share of its "
    "steps that the second had left when the first reached its final loss, mean ± standard "
    "deviation if every seed did. Equal variants have some too."
)


@report_item("Beside the paper", "The family, each variant at its own learning rate")
def family(runs):
    """The variants, each at its best learning rate, and the contrasts between them."""
    made = []
    for number, one in enumerate(one for one in families(runs) if len(one.variants) > 1):
        for part in (_variants(one), _contrasts(one)):
            part.name += str(number or "")
            made += [part] if part.rows else []
    return made


def _variants(family: TunedFamily) -> Table:
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
    return Table(f"{family.name}: variants at their rates", VARIANTS, rows, [VARIANTS_NOTE])


def _contrasts(family: TunedFamily) -> Table:
    values = {
        text: {label: bits(one, text) for label, one in family.variants.items()} for text in TEXTS
    }
    choosing = family.choosing
    values["unseen"] = {
        name: {seed: one for seed, one in by_seed.items() if seed not in choosing}
        for name, by_seed in values["bpb"].items()
    }
    rows = []
    for block, names in (("named", NAMED), ("added later", LATER)):
        pairs = {pair: [family.named(name) for name in pair] for pair in names}
        pairs = {pair: both for pair, both in pairs.items() if None not in both}
        labels = {pair: (first.label, second.label) for pair, (first, second) in pairs.items()}
        found = {text: contrasts(one, labels.values()) for text, one in values.items()}
        for pair, both in pairs.items():
            of = [found[text][labels[pair]] for text in values]
            rows.append(_contrast_row(" − ".join(pair), of, _steps_saved(*both), block))
    rows += _rotation_less_factorization(family, values)
    chosen = f"by the seeds {', '.join(map(str, sorted(choosing)))}" if choosing else "for none"
    notes = [CONTRASTS_NOTE, _when(family), f"Rates were chosen {chosen}."]
    return Table(f"{family.name}: contrasts", CONTRASTS, rows, notes, name="contrasts")


def _contrast_row(name: str, found: Sequence[Contrast], saved: Cell | str, block: str) -> TableRow:
    one, second, unseen = found
    equal = one.equal_within(MARGIN)
    p = "" if unseen.p is None else f", p = {unseen.p:.0e}"
    return TableRow.of(
        name, one.with_interval(4), one.in_words, "" if equal is None else f"p = {equal:.2g}",
        unseen.with_interval(4) + p, second.with_interval(4), saved, block=block,
    )  # fmt: skip


def _rotation_less_factorization(
    family: TunedFamily, values: Mapping[str, Values]
) -> list[TableRow]:
    """One row for whether the rotation decides more than the factorization, if both were run."""
    variants = {name: family.named(name) for name in (*ROTATION, *FACTORIZATION)}
    if None in variants.values():
        return []
    weights = dict.fromkeys((variant.label for variant in variants.values()), 0)
    for sign, (first, second) in ((1, ROTATION), (-1, FACTORIZATION)):
        weights[variants[first].label] += sign
        weights[variants[second].label] -= sign
    name = " − ".join(f"({' − '.join(pair)})" for pair in (ROTATION, FACTORIZATION))
    found = [combined(one, {name: weights})[name] for one in values.values()]
    return [_contrast_row(name, found, "", "added later")]


def _when(family: TunedFamily) -> str:
    """The number of runs that are older than the contrasts."""
    by_rate = [runs for one in family.variants.values() for runs in one.by_rate.values()]
    runs = [run for by_seed in by_rate for run in by_seed.values()]
    before = sum(run.history[0]["time"] < NAMED_ON for run in runs if run.history)
    return f"{before} of {len(runs)} runs began before the commit that names the contrasts."


def _steps_saved(first: TunedVariant, second: TunedVariant) -> Cell:
    curves = [
        {seed: run.curve for seed, run in one.runs.items() if run.curve} for one in (first, second)
    ]
    saved = steps_saved_by_seed(*curves)
    if not saved or None in saved.values():
        return Cell("not in each seed")
    return Cell.over({seed: 100 * share for seed, share in saved.items()})


def bits(variant: TunedVariant, text: str) -> dict[int, float | None]:
    """Bits per byte by seed: of the end of training, or of the runs evaluated on a second text."""
    if text == "bpb":
        return {seed: run.bits_per_byte for seed, run in variant.runs.items()}
    return {
        seed: run.evaluation[text]["bits_per_byte"]
        for seed, run in variant.runs.items()
        if text in (run.evaluation or {})
    }
