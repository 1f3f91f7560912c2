"""Beside the paper: what each line of the family costs, and what it gains, so that one can choose.

Losses are of the runs, each line at its own learning rate. Costs are those of the lines of the same
names in `SCALE`, where each keeps the same share of MHA's cache: bytes and FLOPs are counted from
the configurations, times are read from decode benchmarks of that scale (`lrkv report --bench`).
"""

from lrkv_jax.accounting.counts import (
    cache_allocated_bytes_per_token,
    executed_flops_per_token,
    parameter_counts,
)
from lrkv_jax.accounting.serving import attention_flops
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import apart, look
from lrkv_jax.artefacts.printed import shipped
from lrkv_jax.artefacts.table import Cell, Column, Row, Table
from lrkv_jax.bench.decode import OURS
from lrkv_jax.comparison import against, families
from lrkv_jax.hardware import HARDWARE
from lrkv_jax.paper.family import bits

SCALE = "128m_family"
DEVICE = HARDWARE["h200"]
SHARDS = (1, 2, 6)  # devices that divide the heads: each has its own, and what all heads share
NOTES = [
    "Losses: differences to MHA's bits per byte with 95 % intervals, from one model of all lines "
    f"and seeds of the runs. Costs: the lines of the same names in configs/{SCALE}.yaml, as "
    "multiples of MHA's. Cache: bytes on each device, bfloat16, as allocated. Training: FLOPs of a "
    "token as they are executed. Decode: attention of one layer over the fastest MHA of the same "
    f"benchmark, cached tokens × sequences. {DEVICE.name}: not measured but a bound, the longer of "
    "reading the cache and multiplying at the datasheet's rates. FLOPs/byte: of each cached byte.",
]


@artefact("Beside the paper", "Which line to choose", reads="runs and benches")
def choosing(runs, benches):
    made = []
    for number, family in enumerate(families(runs)):
        costs = {
            name: Cost(name, benches)
            for name in shipped(SCALE).variants
            if family.named(name) is not None
        }
        if "mha" in costs and len(costs) > 1:
            for part in (_table(family, costs), _picture(family, costs)):
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


def _table(family, costs):
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
    return Table("Which line to choose", columns, rows, NOTES, missing=missing)


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
