"""Beside the paper: the family's lines by rate, by contrast, and by what they cost."""

from lrkv_jax.distributed.hardware import HARDWARE
from lrkv_jax.lab.bench.decode import OURS
from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.comparison import against, combined, contrasts, families, sooner_over_seeds
from lrkv_jax.lab.report.figure import Picture, legend_below, panels
from lrkv_jax.lab.report.looks import apart, look
from lrkv_jax.lab.report.printed import shipped
from lrkv_jax.lab.report.table import Cell, Column, Row, Table
from lrkv_jax.models.accounting.counts import (
    cache_allocated_bytes_per_token,
    cache_fraction,
    executed_flops_per_token,
    parameter_counts,
)
from lrkv_jax.models.accounting.serving import attention_flops

NOTE = (
    "Bits per byte on the whole held-out split at the end of training, mean ± standard deviation "
    "over the seeds that all rates of a line have run. Its own rate has the lowest mean; † it is "
    "the smallest or the largest that was tried, so that a better may lie beyond."
)


@artefact("Beside the paper", "Learning rates")
def learning_rates(runs):
    """Each line at several learning rates of the matrices, and its own among them."""
    tables = []
    for family in families(runs):
        swept = {label: line for label, line in family.lines.items() if len(line.by_rate) > 1}
        if swept:
            tables.append(_rate_table(family.name, swept, str(len(tables) or "")))
    missing = ["no line at several learning rates: any scale"]
    return tables or [Table("Learning rates", _columns([]), [], missing=missing)]


def _columns(rates):
    at = [Column(f"{rate:g}", digits=4, group="bits per byte at rate") for rate in rates]
    return [Column("variant"), *at, Column("own rate")]


def _rate_table(name, lines, number):
    rates = sorted({rate for line in lines.values() for rate in line.by_rate})
    rows = []
    for label, line in lines.items():
        cells = []
        for rate in rates:
            bits = line.bits.get(rate, {})
            cells.append(Cell.over(bits) if bits else Cell(gap=f"no run: {label} at {rate:g}"))
        rows.append(Row.of(label, *cells, f"{line.rate:g}{' †' if line.at_edge else ''}"))
    return Table(f"{name}: learning rates", _columns(rates), rows, [NOTE], name=number)


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
CONTRAST_NOTES = [
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
    """The family's lines, each at its own learning rate, and what separates them.

    One model of variant and seed takes all lines of a setting. Contrasts that were named before
    most of the shipped runs stand apart from those that were added later; Holm's p is over those of
    a block.
    """
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
    return Table(f"{family.name}: lines at their own rates", LINES, rows, CONTRAST_NOTES[:1])


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
    notes = [*CONTRAST_NOTES[1:], _when(family), _who_chose(choosing)]
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


SCALE = "128m_family"
DEVICE = HARDWARE["h200"]
SHARDS = (1, 2, 6)  # devices that divide the heads: each has its own, and what all heads share
COST_NOTES = [
    "Losses: differences to MHA's bits per byte with 95 % intervals, from one model of all lines "
    f"and seeds of the runs. Costs: the lines of the same names in configs/{SCALE}.yaml, as "
    "multiples of MHA's. Cache: bytes on each device, bfloat16, as allocated. Training: FLOPs of a "
    "token as they are executed. Decode: attention of one layer over the fastest MHA of the same "
    f"benchmark, cached tokens × sequences. {DEVICE.name}: not measured but a bound, the longer of "
    "reading the cache and multiplying at the datasheet's rates. FLOPs/byte: of each cached byte.",
]


@artefact("Beside the paper", "Which line to choose", reads="runs and benches")
def choosing(runs, benches):
    """What each line of the family costs, and what it gains, so that one can choose.

    Losses are of the runs, each line at its own learning rate. Costs are those of the lines of the
    same names in `SCALE`, where each keeps the same share of MHA's cache: bytes and FLOPs are
    counted from the configurations, times are read from decode benchmarks of that scale (`lrkv
    report --bench`).
    """
    made = []
    for number, family in enumerate(families(runs)):
        costs = {
            name: Cost(name, benches)
            for name in shipped(SCALE).variants
            if family.named(name) is not None
        }
        if "mha" in costs and len(costs) > 1:
            for part in (_cost_table(family, costs), _picture(family, costs)):
                part.name += str(number or "")
                made.append(part)
    missing = [f"no runs of lines of configs/{SCALE}.yaml: configs/nano_family.yaml"]
    return made or [Table("Which line to choose", [Column("variant")], [], missing=missing)]


class Cost:
    """What a line of `SCALE` costs, in multiples of MHA's; `measured` by (batch, cached tokens)."""

    def __init__(self, name, benches):
        config, mha = (shipped(SCALE).variant(one) for one in (name, "mha"))
        self.entry = config.model.attention
        self.cache = [
            _bytes_on_shard(config.model, n) / _bytes_on_shard(mha.model, n) for n in SHARDS
        ]
        context, tokens = config.train.context, config.train.batch * config.train.context
        self.training, own = (
            executed_flops_per_token(one.model, context, tokens) for one in (config, mha)
        )
        self.training /= own
        self.bound = _bound(config.model) / _bound(mha.model)
        moved = cache_allocated_bytes_per_token(config.model)
        self.intensity = attention_flops(config.model).per_cached_token / moved
        self.measured = {}
        for row in (row for bench in benches for row in bench["rows"]):
            here = (row["scale"], row["variant"], row["rope"], row["level"]) == (
                SCALE, name, None, "attention"
            )  # fmt: skip
            if here and row["implementation"] in OURS and row["status"] == "measured":
                shape = row["batch"], row["length"]
                ratios = row["time_over_mha"], self.measured.get(shape, float("inf"))
                self.measured[shape] = min(ratios)


def _bytes_on_shard(model, shards):
    """Bytes that a token leaves on each of `shards` devices between which heads are split."""
    entry = model.attention.on_shard(model, shards)
    heads = model.heads // shards
    shard = model.model_copy(update={"heads": heads, "attention": entry})
    return cache_allocated_bytes_per_token(shard)


def _bound(model):
    """Seconds at least, for each cached token, of one decoding step's attention on `DEVICE`."""
    moved = cache_allocated_bytes_per_token(model) / DEVICE.memory_bandwidth
    return max(moved, attention_flops(model).per_cached_token / DEVICE.bf16_flops)


def _differences(family, costs, text):
    """Each line's difference to MHA on a text, by the line's name in both configurations."""
    lines = {name: bits(family.named(name), text) for name in costs}
    return against(lines.pop("mha"), lines)


def _shapes(costs):
    """The smallest and the largest shape measured: (batch, cached tokens)."""
    found = sorted({shape for cost in costs.values() for shape in cost.measured})
    return [found[0], found[-1]] if len(found) > 1 else found


def _cost_table(family, costs):
    shapes = _shapes(costs)
    columns = [
        Column("variant"),
        *(Column(f"{n} device{'s' * (n > 1)}", digits=2, group="cache on each of") for n in SHARDS),
        Column("FLOPs", digits=2, group="training"),
        *(
            Column(f"{length:,} × {batch}", digits=2, group="decode, measured")
            for batch, length in shapes
        ),
        Column(f"{DEVICE.name}", digits=2, group="decode, bound"),
        Column("FLOPs/byte", digits=0, group="decode"),
        Column("held-out text", "bits/byte", group="difference to MHA"),
        Column("second text", "bits/byte", group="difference to MHA"),
    ]
    found = [_differences(family, costs, text) for text in ("bpb", "docstrings")]
    rows = []
    for name, cost in costs.items():
        times = [cost.measured.get(shape, Cell(gap=f"not measured: {name}")) for shape in shapes]
        losses = [one[name].with_interval(4) if name in one else "" for one in found]
        rows.append(
            Row.of(name, *cost.cache, cost.training, *times, cost.bound, cost.intensity, *losses)
        )
    missing = [] if shapes else [f"no decode benchmark of {SCALE}: --bench FILE.json"]
    return Table("Which line to choose", columns, rows, COST_NOTES, missing=missing)


def _picture(family, costs):
    """Over its cache each line's loss, of the runs' models, and its time and bound, of `SCALE`."""
    found = _differences(family, costs, "bpb")
    batch, length = (_shapes(costs) or [(0, 0)])[-1]
    runs = {name: next(iter(family.named(name).runs.values())) for name in found}
    size = parameter_counts(next(iter(runs.values())).config.model).total / 1e6
    panels_of = {
        f"{family.name}, {size:.0f}M parameters:\nbits/byte over MHA's": (
            lambda name: runs[name].cache_allocated_fraction,
            lambda name: (found[name].difference, found[name].interval), 0,
        ),
        f"{SCALE}: decode time over\nMHA's, {length:,} tokens, batch {batch}": (
            lambda name: costs[name].cache[0],
            lambda name: (costs[name].measured.get((batch, length)), None), 1,
        ),
        f"{SCALE}: decode time over\nMHA's, bound of an {DEVICE.name}": (
            lambda name: costs[name].cache[0], lambda name: (costs[name].bound, None), 1,
        ),
    }  # fmt: skip
    entries = [costs[name].entry for name in found]
    looks = dict(zip(found, apart([look(one.name, one.mode) for one in entries]), strict=True))
    figure, [axes] = panels(1, len(panels_of), panel=(2.7, 3.1))
    for axis, (title, (x, y, level)) in zip(axes, panels_of.items(), strict=True):
        axis.axhline(level, color="black", lw=0.8)
        axis.axvline(1, color="black", lw=0.8)
        for name, one in looks.items():
            value, interval = y(name)
            if value is None:
                continue
            axis.errorbar(
                x(name), value, yerr=None if interval is None else interval[1] - value, capsize=3,
                color=one.colour, marker=one.marker, markersize=6, linestyle="none", label=name,
            )  # fmt: skip
        _log_axis(axis.xaxis, *axis.get_xlim())
        if level:
            _log_axis(axis.yaxis, *axis.get_ylim())
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("cache, as a share of MHA's")
    legend_below(figure, 4)
    return Picture(
        "What each line learns at one size, and costs at another", figure,
        "Left: mean difference to MHA, bits per byte of held-out text, each line at its own "
        "learning rate, over the cache of the same models; bars: 95 % intervals, from one model of "
        "all lines and seeds. Others: time over MHA's, over the cache of the lines of the same "
        f"names in configs/{SCALE}.yaml, whose losses are not known. Left and below is better. "
        "MHA stands where the black lines cross.", name="figure",
    )  # fmt: skip


def _log_axis(axis, low, high):
    """A logarithmic axis with a few plain numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = sorted((max(low, 0.05), high))
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if low / 1.3 <= tick <= high * 1.3]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
