"""Held-out losses: rows of a table, curves over training, and points over the cache's size.

Tables 1, 8 and 9 and figures 2 to 5 are made of these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, MaxNLocator

from lrkv_jax.lab.report.comparison import (
    Curve,
    RunRecord,
    Setting,
    against,
    finished,
    settings,
    spread,
)
from lrkv_jax.lab.report.figure import Picture, draw_mean, empty, legend_below, mean_and_sd, panels
from lrkv_jax.lab.report.looks import Look, apart, look, look_of, name_of
from lrkv_jax.lab.report.printed import Printed
from lrkv_jax.lab.report.table import Cell, Column, Row, Table, no_run
from lrkv_jax.models.accounting.counts import cache_bytes_fraction, cache_fraction

COLUMNS = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("live cache", "bytes/token", digits=0),
    Column("CE", "nats/token", "lower", 4),
    Column("BPB", "bits/byte", "lower", 4),
    Column("BPB over MHA's", "bits/byte"),
    Column("difference from MHA"),
]
NOTE = (
    "Mean ± standard deviation over seeds, on the whole held-out split, at the end of training. "
    "Difference: one model of the block (variant and seed), with its own 95 % interval; p adjusted "
    "by Holm for the number of variants. Where it is not found (p ≥ 0.05), the smallest difference "
    "that such runs would find four times in five stands beside it. Live cache: summed from the "
    "buffers of the evaluated run, in the dtype that a footnote names."
)


def loss_rows(
    block: str,
    lines: Mapping[str, Mapping[int, RunRecord]],
    *,
    beside: Callable[[RunRecord, str], Printed | None],
) -> list[Row]:
    """A row of `COLUMNS` for each line: a name, and its runs by seed.

    A line without runs is a labelled gap, as is one whose runs have not finished. Lines are
    compared with the one named MHA, where there is one. `beside` gives the printed "cache", "ce"
    or "bpb" of a run's setting, if it is one of the paper's.
    """
    done = {name: finished(runs) for name, runs in lines.items()}
    bpb = {name: {s: run.bits_per_byte for s, run in runs.items()} for name, runs in done.items()}
    rivals = {name: values for name, values in bpb.items() if name != "MHA" and values}
    tests = against(bpb.get("MHA", {}), rivals)
    rows = []
    for name, runs in done.items():
        if not runs:
            what = f"{block} {name}"
            gap = Cell(gap=f"not finished: {what}") if lines[name] else no_run(what)
            rows.append(Row.of(name, *[gap] * (len(COLUMNS) - 1), block=block))
            continue
        one, test = next(iter(runs.values())), tests.get(name)
        losses = {seed: run.cross_entropy for seed, run in runs.items()}
        words = "" if test is None else test.in_words
        if test is None and name != "MHA":
            words = "no MHA to compare with"
        rows.append(
            Row.of(
                name,
                Cell(100 * cache_fraction(one.config.model), printed=beside(one, "cache")),
                _live_cache(one, f"{block} {name}"),
                Cell.over(losses, printed=beside(one, "ce")),
                Cell.over(bpb[name], printed=beside(one, "bpb")),
                test.with_interval(4) if test else "",
                words,
                block=block,
            )
        )
    return rows


def _live_cache(run: RunRecord, what: str) -> Cell:
    """The measured bytes of a token in the evaluated run's cache, with its dtype as a footnote."""
    if run.cache_bytes_measured is None:
        return Cell(gap=f"not evaluated: {what}")
    dtype = run.evaluation.get("kv_cache_dtype") or run.evaluation.get("dtype", "")
    return Cell(run.cache_bytes_measured, note=dtype and f"A cache in {dtype}.")


def headline(runs: Sequence[RunRecord]) -> Table:
    """One row for each variant of each setting: its cache, its loss, and whether that differs."""
    columns = [
        Column("variant"), Column("run"), Column("cache", "% of MHA's bytes", digits=1),
        Column("bits per byte", "", "lower", 4), Column("over MHA's"), Column("difference"),
        Column("benchmarks", "%", "higher", 1),
    ]  # fmt: skip
    rows = []
    for setting in settings(runs):
        # As in Table 1, whose p-values are then these; an ablation alone is shown as a whole.
        main = [label for label, seeds in setting.beside.items() if seeds]
        bits = {
            label: {seed: run.bits_per_byte for seed, run in done.items()}
            for label in main or setting.labels
            if (done := finished(setting.seeds(label)))
        }
        tests = against(bits.get("MHA", {}), {k: v for k, v in bits.items() if k != "MHA"})
        for label, seeds in bits.items():
            every = list(finished(setting.seeds(label)).items())
            scores = {
                seed: 100 * run.evaluation["combined"]
                for seed, run in every
                if (run.evaluation or {}).get("combined") is not None
            }
            test = tests.get(label)
            over = test.with_interval(4) if test else ""
            rows.append(
                Row.of(
                    label, _named([run for _, run in every]),
                    100 * every[0][1].cache_allocated_fraction, Cell.over(seeds),
                    over, test.in_words if test else "",
                    Cell.over(scores) if scores else Cell(), block=setting.name,
                )
            )  # fmt: skip
    if all(row.cells[-1].value is None for row in rows):
        columns, rows = columns[:-1], [Row(row.cells[:-1], row.block) for row in rows]
    return Table(
        "Held-out loss and cache of every variant", columns, rows,
        caption="Mean ± standard deviation over seeds. Cache: bfloat16, as allocated.",
    )  # fmt: skip


def _named(runs: Sequence[RunRecord]) -> str:
    """The names of a line's runs, in the order of their seeds: the first, and how many follow."""
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"{runs[0].path.name}{more}"


# Curves over training.

MARKED = 12  # validations up to which each has its marker

CURVES_NOTE = (
    "Above: means over seeds. Below: differences to {baseline} of the same seed; bands are one "
    "standard deviation. Pale: training loss, in means of equal stretches of steps. Upper axis: "
    "training FLOPs of {baseline}, 6·(N − lookup) + 12·L·H·K·T per token. All held-out losses are "
    "of the same text."
)


@dataclass(frozen=True)
class CurveLine:
    """A line of the picture: how it looks, its runs by seed, and what its gap is called."""

    look: Look
    runs: Mapping[int, RunRecord]
    missing: str

    @property
    def curves(self) -> dict[int, Curve]:
        """Curves by seed of the finished runs; of running ones where none is finished.

        A run that has just begun would cut the others' mean short.
        """
        done = finished(self.runs) or self.runs
        return {seed: run.curve for seed, run in done.items() if run.curve}

    @property
    def training(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and training loss of the same runs, as far as their rows were kept."""
        done = finished(self.runs) or self.runs
        return [run.training_curve for run in done.values() if run.training_curve]


def curves(
    title: str,
    columns: Mapping[str, Mapping[str, CurveLine]],
    *,
    baseline: str,
    gap: str,
    name: str = "",
) -> Picture:
    """Columns of two panels: {setting: {name of a line: the line}}, `baseline` one of the names.

    What variants differ by is a hundredth of what training changes: above are the losses, below
    their differences to the baseline of the same seed. `gap` says what is missing where there are
    no columns.
    """
    if not columns:
        return Picture(title, None, gaps=[f"no run: {gap}"], name=name)
    figure, axes = panels(2, len(columns), sharex="col", panel=(4.2, 2.9))
    gaps = []
    for column, (setting, lines) in zip(zip(*axes, strict=True), columns.items(), strict=True):
        _column(column, setting, lines, baseline)
        gaps += [
            f"{'no validation yet' if line.runs else 'no run'}: {line.missing}"
            for line in lines.values()
            if not line.curves
        ]
    legend_below(figure)
    words = next(iter(columns.values()))[baseline].look.name
    return Picture(title, figure, CURVES_NOTE.format(baseline=words), gaps=gaps, name=name)


def curves_by_kind(title: str, settings: Sequence[Setting], gap: str) -> Picture:
    """A column for each setting that has a curve: its lines beside one another, over MHA."""
    columns = {
        setting: {
            one.name: CurveLine(one, runs, f"{setting} {label}") for label, one, runs in lines
        }
        for setting, lines in looks_beside(
            [one for one in settings if any(run.curve or run.training_curve for run in one.runs)]
        ).items()
    }
    return curves(title, columns, baseline=name_of("mha"), gap=gap)


def looks_beside(
    settings: Sequence[Setting],
) -> dict[str, list[tuple[str, Look, dict[int, RunRecord]]]]:
    """By setting: label, look and runs by seed of each line that stands there beside others.

    A look has the label for a name where another of its setting has the same. A kind without a run
    has its own name for a label.
    """
    made: dict[str, list[tuple[str, Look, dict[int, RunRecord]]]] = {}
    twice: set[str] = set()
    for setting in settings:
        beside = setting.beside
        looks = apart([
            look_of(next(iter(runs.values()))) if runs else look(label)
            for label, runs in beside.items()
        ])  # fmt: skip
        names = [each.name for each in looks]
        twice |= {name for name in names if names.count(name) > 1}
        made[setting.name] = list(zip(beside, looks, beside.values(), strict=True))
    return {
        setting: [
            (label, replace(one, name=label) if one.name in twice else one, runs)
            for label, one, runs in lines
        ]
        for setting, lines in made.items()
    }


def _column(
    axes: Sequence[Axes], setting: str, lines: Mapping[str, CurveLine], baseline: str
) -> None:
    above, below = axes
    reference = lines[baseline].curves
    for line in lines.values():
        own = line.curves
        _training_line(above, line)
        _line(above, line.look, [(curve, curve.cross_entropy) for curve in own.values()])
        _line(below, line.look, [
            (curve, curve.cross_entropy[:shared] - other.cross_entropy[:shared])
            for seed, curve in own.items()
            if (other := reference.get(seed)) and other.heldout_tokens == curve.heldout_tokens
            and (shared := min(len(other.steps), len(curve.steps)))
        ])  # fmt: skip
    named = lines[baseline].look.name
    above.set_title(setting)
    above.set_ylabel("cross-entropy,\nnats/token")
    below.set_xlabel("training tokens")
    below.xaxis.set_major_formatter(EngFormatter())
    if not reference:
        what = "no validation yet" if lines[baseline].runs else "no run"
        empty(below, f"{what}: {lines[baseline].missing}")
        return
    below.set_ylabel(f"difference to {named},\nnats/token")
    curve = next(iter(reference.values()))
    flops = curve.flops[-1] / curve.tokens[-1]
    top = above.secondary_xaxis("top", (lambda t: t * flops, lambda f: f / flops))
    top.set_xlabel(f"training FLOPs ({named})")
    top.xaxis.set_major_formatter(EngFormatter())
    top.xaxis.set_major_locator(MaxNLocator(5))


def _line(axis: Axes, one: Look, seeds: Sequence[tuple[Curve, np.ndarray]]) -> None:
    """Draw the mean over seeds, as far as all seeds have come, and its band."""
    if not seeds:
        return
    points = min(len(values) for _, values in seeds)  # a run may still be going
    tokens = seeds[0][0].tokens[:points]
    mean, sd = mean_and_sd(values[:points] for _, values in seeds)
    # Few points are marked each: a line through them says more than there is.
    every = None if points <= MARKED else 0.15
    draw_mean(axis, tokens, mean, sd, label=one.name, markevery=every, **one.style)


def _training_line(axis: Axes, line: CurveLine) -> None:
    """Draw the mean training loss over seeds, as far as all seeds have come."""
    seeds = line.training
    if not seeds:
        return
    points = min(len(loss) for _, loss in seeds)
    mean, _ = mean_and_sd(loss[:points] for _, loss in seeds)
    label = None if line.curves else line.look.name
    axis.plot(seeds[0][0][:points], mean, color=line.look.colour, lw=0.8, alpha=0.45, label=label)


# Points over the cache.

CACHE_LABEL = "KV cache, % of MHA's bytes"
CACHE_NOTE = (
    "Means over seeds on the whole held-out split, at the end of training; bars: one standard "
    "deviation. Cache share: by the formula, of a bfloat16 cache with LRKV's float32 inverse norms "
    "and MLA's rope key, which the paper's shares leave out."
)


def against_cache(
    axis: Axes,
    look: Look,
    points: Sequence[Mapping[int, RunRecord]],
    loss: str,
    *,
    marks: Sequence[str] = (),
    above: bool = False,
) -> None:
    """Draw points of finished runs by seed: the mean of their `loss` (an attribute of `RunRecord`).

    Error bars are one standard deviation over seeds; several points are joined from the smallest
    cache to the largest. `marks` are written `above` their bars, or below.
    """
    rows = []
    for place, runs in enumerate(points):
        over = spread([getattr(run, loss) for run in runs.values()])
        share = 100 * cache_bytes_fraction(next(iter(runs.values())).config.model)
        rows.append((share, over.mean, over.sd, marks[place] if marks else ""))
    rows.sort(key=lambda row: row[0])
    shares, means, sds, _ = zip(*rows, strict=True)
    bars = None if set(sds) == {None} else [sd or 0.0 for sd in sds]
    style = look.style if len(rows) > 1 else look.style | {"linestyle": "none"}
    axis.errorbar(shares, means, yerr=bars, capsize=3, label=look.name, **style)
    axis.margins(y=0.15)  # room for the marks
    side = 1 if above else -1
    for share, mean, sd, mark in rows:
        axis.annotate(
            mark, (share, mean + side * (sd or 0.0)), xytext=(0, 6 * side),
            textcoords="offset points", ha="center", va="bottom" if above else "top", fontsize=7,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip
