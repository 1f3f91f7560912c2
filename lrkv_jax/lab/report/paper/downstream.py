"""Benchmark scores: Table 2 and Figure 19."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.comparison import (
    Correlation,
    correlation,
    every_setting,
    pretraining,
    settings,
    spread,
)
from lrkv_jax.lab.report.figure import Picture, legend_below, panels
from lrkv_jax.lab.report.looks import GREY, Look, look, look_of, name_of
from lrkv_jax.lab.report.printed import KINDS, SCALES, printed
from lrkv_jax.lab.report.table import Cell, Column, Row, Table, no_run, paper_table

TASKS = {
    "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "mmlu": "MMLU", "gsm8k": "GSM8K",
    "humaneval": "HumanEval", "combined": "combined",
}  # fmt: skip
COLUMNS = [Column("variant")] + [Column(name, "%", "higher", 1) for name in TASKS.values()]


@artefact("Table 2", "Downstream tasks")
def table02_downstream(runs):
    """The five benchmarks, by variant, from each run's `evaluation.json`.

    It shows runs evaluated with `lrkv evaluate RUN --tasks arc_easy,...`; midtrained ones first.
    """
    asked = [run for run in runs if any(task in (run.evaluation or {}) for task in TASKS)]
    rows = []
    for midtrained in (True, False):
        for setting in settings(asked, midtrained=midtrained):
            rows += _block(setting, setting.name + ("" if midtrained else ", pretrained alone"))
    note = (
        "Mean ± standard deviation over seeds; a rate p of n examples has itself a standard "
        "error of √(p (1 − p) / n) for one model. Combined: the mean of the five."
    )
    missing = [] if rows else ["no run was evaluated on a benchmark"]
    return [Table("Downstream tasks", COLUMNS, rows, [note], missing=missing), _scores_as_printed()]


def _block(setting, name):
    for label, seeds in setting.beside.items():
        line = label if seeds else name_of(label)
        yield Row.of(line, *(_cell(seeds, task, name, line) for task in TASKS), block=name)


def _cell(seeds, task, block, line):
    if not seeds:
        return no_run(f"{block} {line}")
    answers = {s: run.evaluation[task] for s, run in seeds.items() if task in run.evaluation}
    if not answers:
        return Cell(gap=f"not evaluated: {block} {line} {task}")
    if task == "combined":
        return Cell.over({s: 100 * score for s, score in answers.items()})
    example = next(iter(answers.values()))
    # Evaluations of earlier versions could be asked as the lm-evaluation-harness asks.
    where = "as the harness asks" if example.get("style") == "harness" else "in a chat"
    note = f"{TASKS[task]}: {example['examples']:,} examples, asked {where}."
    return Cell.over({s: 100 * answer["score"] for s, answer in answers.items()}, note=note)


def _scores_as_printed():
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table02", scale, kind, task) for task in TASKS]
            if all(values):
                rows.append((f"{SCALES[scale]}: paper, printed", name_of(kind), values))
    columns = [Column("variant")] + [Column(name, "%") for name in TASKS.values()]
    return paper_table(columns, rows)


INTERVAL = (
    "R² of the variants' means; its 95 % interval by Fisher's z spans, for five points, most of "
    "the possible range."
)
# A variant: its look, its name, and by seed its bits per byte and its scores in per cent.
Point = tuple[Look, str, Sequence[float], Sequence[float]]


@artefact("Figure 19", "Bits per byte against benchmark scores")
def fig19_downstream_correlation(runs):
    """Whether bits per byte after pretraining predict the combined score of five benchmarks.

    Shown are runs that were evaluated on all five benchmarks; a midtrained one stands at the bits
    per byte of the run it was started from, which is read from `init_from` where it is not among
    the runs given. A point is a variant, the mean over its seeds.
    """
    return [_measured(runs), _correlation_as_printed()]


def _measured(runs):
    groups, gaps = defaultdict(lambda: defaultdict(list)), []
    known = {run.path.resolve(): run for run in runs}
    for setting in every_setting(runs):
        for run in setting.runs:
            if (run.evaluation or {}).get("combined") is None:
                continue
            try:
                point = pretraining(run, known).bits_per_byte, 100 * run.evaluation["combined"]
                groups[setting.name][look_of(run), run.label].append(point)
            except LrkvError as error:
                gaps.append(str(error))
    title = "Combined score against bits per byte after pretraining"
    if not groups:
        return Picture(title, None, gaps=[*gaps, "no run evaluated on all five benchmarks"])
    figure, axes = panels(1, len(groups))
    for axis, (name, variants) in zip(axes[0], groups.items(), strict=True):
        points = [(*which, *zip(*each, strict=True)) for which, each in variants.items()]
        if _correlated(axis, name, points) is None:
            gaps.append(f"fewer than 3 variants to correlate: {name}")
    legend_below(figure)
    return Picture(
        title, figure, f"Means over seeds, bars one standard deviation. {INTERVAL}", gaps=gaps
    )


def _correlation_as_printed():
    """The paper's own points, at the scales for which it prints both."""
    shown = {}
    for scale, name in SCALES.items():
        bpb = {kind: printed("table01", "bpb", scale, kind) for kind in KINDS}
        score = {kind: printed("table02", scale, kind, "combined") for kind in KINDS}
        if all(bpb.values()) and all(score.values()):
            shown[f"paper, printed: {name}"] = [
                (look(kind), look(kind).name, [bpb[kind].value], [score[kind].value])
                for kind in KINDS
            ]
    figure, axes = panels(1, len(shown))
    for axis, (title, points) in zip(axes[0], shown.items(), strict=True):
        _correlated(axis, title, points)
    legend_below(figure)
    claimed = printed("fig19", "r_squared")
    return Picture(
        "The paper's values, printed", figure,
        f"R² recomputed from Tables 1 and 2; the paper prints {claimed.text} for 2.5B and none for "
        f"the other scales. {INTERVAL}",
        name="printed",
    )  # fmt: skip


def _correlated(axis: Axes, title: str, points: Sequence[Point]) -> Correlation | None:
    """Draw means over seeds, bars of one standard deviation, the least-squares line and R².

    Returns the correlation of the means, or None for fewer than 3 points.
    """
    for one, label, bits, scores in points:
        across, up = spread(bits), spread(scores)
        axis.errorbar(
            across.mean, up.mean, xerr=across.sd, yerr=up.sd, label=label, capsize=3,
            **one.style | {"linestyle": "none"},
        )  # fmt: skip
    x = [spread(bits).mean for _, _, bits, _ in points]
    y = [spread(scores).mean for *_, scores in points]
    found = correlation(x, y)
    if found:
        ends = np.array([min(x), max(x)])
        slope, at_zero = np.polyfit(x, y, 1)
        axis.plot(ends, slope * ends + at_zero, color=GREY, lw=1, ls="--", zorder=1)
    axis.set_title(f"{title}\n{found.in_words if found else 'too few variants to correlate'}")
    axis.invert_xaxis()
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.margins(0.12)
    axis.set_xlabel("pretraining bits/byte (better to the right)")
    axis.set_ylabel("combined score, %")
    return found
