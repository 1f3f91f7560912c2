"""Beside the paper: the family's lines, each at its own learning rate, and what separates them.

The contrasts are named here, before the runs are made. One model of variant and seed takes all
lines of a setting; Holm's p is over the contrasts named.
"""

from lrkv_jax.accounting.counts import cache_fraction
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.comparison import contrasts, families, sooner_over_seeds

# By the names that configs/nano_family.yaml gives its lines.
NAMED = (
    ("lrkv_latent", "mha"),
    ("lrkv_latent", "lrkv_full"),
    ("lrkv_shared", "lrkv_full"),
    ("mla_full", "mla"),
    ("mla_full", "mha"),
    ("lrkv_latent_tied_16", "lrkv_latent_third"),  # at equal bytes
)
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
    Column("on the second text", "bits/byte"),
    Column("sooner", "% of steps", digits=1),
]
NOTES = [
    "Each line at its own learning rate (the table of learning rates), on the whole held-out split "
    "and on docstrings of Python's standard library; mean ± standard deviation over seeds. Cache: "
    "bfloat16, as allocated.",
    "First less second, from one model of all lines and seeds, with its own 95 % interval; p "
    "adjusted by Holm for the contrasts of this table. Where none is found, the smallest that such "
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
                f"{line.rate:g}", len(line.runs), *texts,
            )
        )  # fmt: skip
    return Table(f"{family.name}: lines at their own rates", LINES, rows, NOTES[:1])


def _contrasts(family):
    values = {text: {n: bits(line, text) for n, line in family.lines.items()} for text in TEXTS}
    pairs, missing = {}, []
    for names in NAMED:
        lines = [family.named(name) for name in names]
        if None in lines:
            absent = [n for n, line in zip(names, lines, strict=True) if line is None]
            missing.append(f"no run: {family.name} {' and '.join(absent)}")
        else:
            pairs[names] = lines
    labels = {names: tuple(line.label for line in lines) for names, lines in pairs.items()}
    found = {text: contrasts(values[text], labels.values()) for text in TEXTS}
    rows = []
    for names, lines in pairs.items():
        one, second = (found[text][labels[names]] for text in TEXTS)
        equal = one.equal_within(MARGIN)
        rows.append(
            Row.of(
                " − ".join(names), one.with_interval(4), one.in_words,
                "" if equal is None else f"p = {equal:.2g}", second.with_interval(4),
                _sooner(*lines),
            )
        )  # fmt: skip
    title = f"{family.name}: contrasts named beforehand"
    return Table(title, CONTRASTS, rows, NOTES[1:], name="contrasts", missing=missing)


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
