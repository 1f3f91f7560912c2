"""Beside the paper: the family's lines, each at its own learning rate, and what separates them.

One model of variant and seed takes all lines of a setting. Contrasts that were named before most of
the shipped runs stand apart from those that were added later; Holm's p is over those of a block.
"""

from lrkv_jax.accounting.counts import cache_fraction
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import combined, contrasts, families, sooner_over_seeds

# By the names that configs/nano_family.yaml gives its lines.
NAMED = (
    ("lrkv_latent", "mha"),
    ("lrkv_latent", "lrkv_full"),
    ("lrkv_shared", "lrkv_full"),
    ("mla_full", "mla"),
    ("mla_full", "mha"),
    ("lrkv_latent_tied_16", "lrkv_latent_third"),  # at equal bytes
)
NAMED_ON = "2026-11-23T04:15:29+00:00"  # the commit that has them first
# What readers asked of the runs afterwards.
LATER = (("lrkv_full", "mha"),)
ROTATION, FACTORISATION = ("lrkv_full", "lrkv_latent"), ("mha", "lrkv_full")
# Bits per byte: differences below it would change nobody's choice.
MARGIN = 0.005
TEXTS = {"bpb": "held-out text", "docstrings": "second text"}

LINES = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("cache", "% of MHA's bytes", digits=1),
    Column("own rate"),
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
NOTES = [
    "Each line at its own learning rate (the table of learning rates), on the whole held-out split "
    "and on docstrings of Python's standard library; mean ± standard deviation over seeds. Not "
    "swept: trained at this rate alone. Cache: bfloat16, as allocated.",
    "First less second, from one model of all lines and seeds, with its own 95 % interval; p "
    "adjusted by Holm for the contrasts of a block. Where none is found, the smallest that such "
    "runs would find four times in five stands beside it. Equal: p of two one-sided tests. Sooner: "
    "the share of its training that the second had left when the first came down to its last "
    "validation, mean ± standard deviation where each seed did; two equal lines have some too.",
]


@artefact("Beside the paper", "The family, each line at its own learning rate")
def family(runs):
    made = []
    for number, one in enumerate(one for one in families(runs) if len(one.lines) > 1):
        for part in (_lines(one), _contrasts(one)):
            part.name += str(number or "")
            made.append(part)
    missing = ["no two lines of one setting: any scale"]
    return made or [Table("The family", LINES, [], missing=missing)]


def _lines(family):
    rows = []
    for label, line in family.lines.items():
        first = next(iter(line.runs.values()))
        model = first.config.model
        texts = [
            Cell.over(found) if (found := bits(line, text)) else Cell(gap=f"{text} not evaluated")
            for text in TEXTS
        ]
        rows.append(
            Row.of(
                label, 100 * cache_fraction(model), 100 * first.cache_allocated_fraction,
                f"{line.rate:g}{'' if line.swept else ', not swept'}", len(line.runs), *texts,
            )
        )  # fmt: skip
    return Table(f"{family.name}: lines at their own rates", LINES, rows, NOTES[:1])


def _contrasts(family):
    values = {text: {n: bits(line, text) for n, line in family.lines.items()} for text in TEXTS}
    choosing = family.choosing
    values["unseen"] = {
        name: {seed: one for seed, one in by_seed.items() if seed not in choosing}
        for name, by_seed in values["bpb"].items()
    }
    rows, missing = [], []
    for block, names in (("named", NAMED), ("added later", LATER)):
        pairs = {}
        for pair in names:
            lines = [family.named(name) for name in pair]
            if None not in lines:
                pairs[pair] = lines
            elif names is NAMED:
                absent = [n for n, line in zip(pair, lines, strict=True) if line is None]
                missing.append(f"no run: {family.name} {' and '.join(absent)}")
        labels = {pair: tuple(line.label for line in lines) for pair, lines in pairs.items()}
        found = {text: contrasts(one, labels.values()) for text, one in values.items()}
        for pair, lines in pairs.items():
            of = [found[text][labels[pair]] for text in values]
            rows.append(_row(" − ".join(pair), of, _sooner(*lines), block))
    rows += _rotation_less_factorisation(family, values)
    title = f"{family.name}: contrasts"
    notes = [*NOTES[1:], _when(family), _who_chose(choosing)]
    return Table(title, CONTRASTS, rows, notes, name="contrasts", missing=missing)


def _row(name, found, sooner, block):
    one, second, unseen = found
    equal = one.equal_within(MARGIN)
    p = "" if unseen.p is None else f", p = {unseen.p:.0e}"
    return Row.of(
        name, one.with_interval(4), one.in_words, "" if equal is None else f"p = {equal:.2g}",
        unseen.with_interval(4) + p, second.with_interval(4), sooner, block=block,
    )  # fmt: skip


def _rotation_less_factorisation(family, values):
    """Whether one decides more than the other; none without the lines of both."""
    lines = {name: family.named(name) for name in (*ROTATION, *FACTORISATION)}
    if None in lines.values():
        return []
    weights = dict.fromkeys((line.label for line in lines.values()), 0)
    for sign, (first, second) in ((1, ROTATION), (-1, FACTORISATION)):
        weights[lines[first].label] += sign
        weights[lines[second].label] -= sign
    name = " − ".join(f"({' − '.join(pair)})" for pair in (ROTATION, FACTORISATION))
    found = [combined(one, weights) for one in values.values()]
    return [_row(name, found, "", "added later")]


def _when(family):
    """How many of the runs are older than the contrasts."""
    runs = [
        run for line in family.lines.values() for by_seed in line.by_rate.values()
        for run in by_seed.values()
    ]  # fmt: skip
    began = [run.history[0]["time"] for run in runs if run.history]
    before = sum(time < NAMED_ON for time in began)
    return f"{before} of {len(runs)} runs began before the commit that names the contrasts."


def _who_chose(seeds):
    if not seeds:
        return "No rate was chosen."
    return f"Rates were chosen by the seeds {', '.join(map(str, sorted(seeds)))}."


def _sooner(first, second):
    curves = [
        {s: run.curve for s, run in line.runs.items() if run.curve} for line in (first, second)
    ]
    over = sooner_over_seeds(*curves)
    if over.steps is None:
        return Cell("not in each seed")
    return Cell.over({seed: 100 * one.steps for seed, one in over.each.items()})


def bits(line, text):
    """Bits per byte by seed: of the end of training, or of the runs evaluated on a second text."""
    if text == "bpb":
        return {seed: run.bits_per_byte for seed, run in line.runs.items()}
    return {
        seed: run.evaluation[text]["bits_per_byte"]
        for seed, run in line.runs.items()
        if text in (run.evaluation or {})
    }
