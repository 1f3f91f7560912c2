"""Benchmark scores: Table 2 and Figure 19."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.comparison.contrasts import correlation, mean_and_sd
from lrkv_jax.lab.report.comparison.files import read_run_record
from lrkv_jax.lab.report.comparison.runs import RunRecord, every_setting, settings
from lrkv_jax.lab.report.figures import Picture, legend_below, panels
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper_values import paper_value
from lrkv_jax.lab.report.styles import GRAY, VariantStyle, run_style
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow, table_of_paper

TASKS = {
    "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "mmlu": "MMLU", "gsm8k": "GSM8K",
    "humaneval": "HumanEval", "combined": "combined",
}  # fmt: skip


@report_item("Table 2", "Downstream tasks")
def table02_downstream(runs):
    """The five benchmarks, by variant, from each run's `evaluation.json`; midtrained runs first."""
    evaluated = [run for run in runs if any(task in run.final_evaluation for task in TASKS)]
    rows = []
    for midtrained in (True, False):
        for setting in settings(evaluated, midtrained=midtrained):
            block = setting.name + ("" if midtrained else ", pretrained alone")
            for label, seeds in setting.beside.items():
                cells = [_score(seeds, task) for task in TASKS]
                rows.append(TableRow.of(label, *cells, block=block))
    columns = [Column("variant"), *(Column(name, "%", "higher", 1) for name in TASKS.values())]
    note = (
        "Mean ± standard deviation over seeds; a rate p of n examples has itself a standard "
        "error of √(p (1 − p) / n) for one model. Combined: the mean of the five."
    )
    ours = [Table("Downstream tasks", columns, rows, [note])] if rows else []
    printed = {task: Column(name, "%") for task, name in TASKS.items()}
    return [*ours, table_of_paper("table02", printed)]


def _score(seeds: Mapping[int, RunRecord], task: str) -> Cell:
    found = {s: run.final_evaluation for s, run in seeds.items()}
    answers = {s: one[task] for s, one in found.items() if task in one}
    demonstration = any(map(_demonstrated, found.values()))
    if task == "combined":
        note = "Combined: of demonstration sets, no benchmark's." if demonstration else ""
        return Cell.over({s: 100 * score for s, score in answers.items()}, note=note)
    scores = {s: 100 * answer["score"] for s, answer in answers.items()}
    if not answers:
        return Cell()
    counts = sorted({answer["examples"] for answer in answers.values()})
    examples = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    what = "examples of a demonstration set" if demonstration else "examples"
    note = f"{TASKS[task]}: {examples} {what}, asked in a chat."
    return Cell.over(scores, note=note)


def _demonstrated(evaluation: Mapping[str, Any]) -> bool:
    """Whether benchmarks were asked in the sets that ship, which say that the code runs."""
    asked = [evaluation[task] for task in TASKS if task != "combined" and task in evaluation]
    return any(found.get("dataset", {}).get("demonstration") for found in asked)


# By a variant's style and name: bits per byte and scores in per cent, by seed.
Points = Mapping[tuple[VariantStyle, str], tuple[Sequence[float], Sequence[float]]]


@report_item("Figure 19", "Bits per byte against benchmark scores")
def fig19_downstream_correlation(runs):
    """The combined score of five benchmarks against bits per byte after pretraining.

    The bits of a midtrained run are those of the run it was started from, which is read from
    `init_from` where it is not among the runs given.
    """
    shown = _measured(runs)
    if not shown:
        return []
    figure, axes = panels(1, len(shown))
    for axis, (heading, points) in zip(axes[0], shown.items(), strict=True):
        _draw(axis, heading, points)
    legend_below(figure)
    claimed = paper_value("fig19", "r_squared").text
    return Picture(
        "Combined score against bits per byte after pretraining", figure,
        "Means over seeds, bars one standard deviation. R² of the variants' means; its 95 % "
        "interval by Fisher's z spans, for five points, most of the possible range. The paper "
        f"prints {claimed} for 2.5B and none for the other scales.",
    )  # fmt: skip


def _measured(runs: Sequence[RunRecord]) -> Mapping[str, Points]:
    found: dict[str, dict] = {}
    known = {run.path.resolve(): run for run in runs}
    for setting in every_setting(runs):
        for run in setting.runs:
            bits, evaluation = _pretraining_bits(run, known), run.final_evaluation
            if bits is None or evaluation.get("combined") is None or _demonstrated(evaluation):
                continue
            points = found.setdefault(setting.name, {})
            at = points.setdefault((run_style(run), run.label), ([], []))
            at[0].append(bits)
            at[1].append(100 * evaluation["combined"])
    return found


def _pretraining_bits(run: RunRecord, known: Mapping[Path, RunRecord]) -> float | None:
    """Bits per byte of the run whose loss is of text: this one, or what it was started from."""
    while run.midtrained:
        if not run.config.init_from:
            return None
        path = Path(run.config.init_from).resolve()
        try:
            run = known.get(path) or read_run_record(path)
        except LrkvError:  # it is not there, or damaged
            return None
    return run.bits_per_byte


def _draw(axis: Axes, heading: str, points: Points) -> None:
    """Draw means over seeds, bars of one standard deviation, the least-squares line and R²."""
    x, y = [], []
    for (style, label), (bits, scores) in points.items():
        (across, xerr), (up, yerr) = mean_and_sd(bits), mean_and_sd(scores)
        axis.errorbar(
            across, up, xerr=xerr, yerr=yerr, label=label, capsize=3,
            **style.plot | {"linestyle": "none"},
        )  # fmt: skip
        x.append(across)
        y.append(up)
    found = correlation(x, y)
    if found:
        ends = np.array([min(x), max(x)])
        slope, at_zero = np.polyfit(x, y, 1)
        axis.plot(ends, slope * ends + at_zero, color=GRAY, lw=1, ls="--", zorder=1)
    axis.set_title(f"{heading}\n{found.in_words if found else 'too few variants to correlate'}")
    axis.invert_xaxis()
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.margins(0.12)
    axis.set_xlabel("pretraining bits/byte (better to the right)")
    axis.set_ylabel("combined score, %")
